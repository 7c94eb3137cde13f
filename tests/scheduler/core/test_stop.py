"""Stop strings against ``bytes.find`` on the whole text."""

import gc
import weakref

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.stopping.arena import Arena
from services.scheduler.core.stopping.automaton import Automaton
from services.scheduler.core.stopping.matcher import StopMatcher
from services.scheduler.core.stopping.tokens import StopTokens
from tests.properties import examples

alphabet = st.sampled_from(["a", "b", "ab", "é", "漢", "\n"])
strings = st.lists(st.lists(alphabet, min_size=1, max_size=6).map("".join), min_size=1, max_size=4)
token_bytes = st.lists(
    st.one_of(
        st.lists(alphabet, max_size=5).map(lambda parts: "".join(parts).encode()),
        st.binary(max_size=3),
        st.sampled_from([b"\xe6", b"\xbc", b"\xa2", b"\xc3", b"\xa9", b"a" * 40]),
    ),
    min_size=1,
    max_size=12,
)


def first_end(text: bytes, patterns: list[bytes]) -> int | None:
    """Where the first of the patterns that is through ends."""
    ends = [text.find(pattern) + len(pattern) for pattern in patterns if pattern in text]
    return min(ends, default=None)


@settings(max_examples=examples(500), deadline=None)
@given(token_bytes, st.lists(strings, min_size=1, max_size=4), st.data())
def test_matches_are_those_of_find_on_the_whole_text(vocabulary, sets, data):
    """Several sequences with different strings in one call, rows built early, late and never."""
    matcher = StopMatcher(vocabulary, len(vocabulary) + 2, row_misses=data.draw(st.sampled_from([1, 3, 10**9])))
    automata = [Automaton(group) for group in sets]
    states = np.array([matcher.acquire(automaton) for automaton in automata], np.int32)
    texts, done = [b""] * len(sets), [False] * len(sets)
    for _ in range(data.draw(st.integers(1, 30))):
        tokens = np.array([data.draw(st.integers(0, len(vocabulary) + 1)) for _ in sets])
        moved, matched = matcher.advance(states, tokens)
        for row, automaton in enumerate(automata):
            if done[row]:
                continue
            token = int(tokens[row])
            texts[row] += vocabulary[token] if token < len(vocabulary) else b""
            end = first_end(texts[row], automaton.patterns)
            assert matched[row] == (end is not None)
            if end is not None:
                done[row] = True
                index, trailing = matcher.first_match(automaton, int(states[row]), token)
                assert texts[row][:end].endswith(automaton.patterns[index])
                assert len(texts[row]) - trailing == end - len(automaton.patterns[index])
                longest = max(len(p) for p in automaton.patterns if texts[row][:end].endswith(p))
                assert len(automaton.patterns[index]) == longest
        states = moved


@settings(max_examples=examples(200), deadline=None)
@given(strings, st.lists(alphabet, max_size=30).map("".join), st.integers(0, 30))
def test_a_match_that_does_not_count_yet_does_not_hide_later_ones(group, text, skip):
    automaton = Automaton(group)
    data = text.encode()
    skip = min(skip, len(data))
    state = automaton.run(0, data[:skip])
    patterns = automaton.patterns
    ends = [end for end in range(skip + 1, len(data) + 1) if any(data[:end].endswith(pattern) for pattern in patterns)]
    match = automaton.first_match(state, data[skip:])
    assert (match is not None) == bool(ends)
    if match is not None:
        index, trailing = match
        assert len(data) - trailing + len(automaton.patterns[index]) == min(ends)


def test_a_stop_string_longer_than_any_window_is_found():
    long = "abcdefghij" * 400
    matcher = StopMatcher([bytes([byte]) for byte in range(256)], 256, row_misses=1)
    state = np.array([matcher.acquire(Automaton([long]))], np.int32)
    for index, byte in enumerate(("x" + long).encode()):
        state, matched = matcher.advance(state, np.array([byte]))
        assert bool(matched[0]) == (index == len(long))


def test_tables_of_strings_no_longer_used_are_given_back(monkeypatch):
    monkeypatch.setattr("services.scheduler.core.stopping.matcher._UNUSED_CELLS", 2000)
    matcher = StopMatcher([b"a", b"b"], 2, row_misses=1)
    for number in range(200):
        automaton = Automaton([f"a{number}b" * 3])
        base = matcher.acquire(automaton)
        matcher.advance(np.array([base, base], np.int32), np.array([0, 1]))
        matcher.release(automaton)
    assert matcher.nbytes < 4 * 10_000


def test_short_stop_strings_no_longer_used_are_forgotten_too():
    matcher = StopMatcher([b"a", b"b"], 2)
    known = []
    for number in range(2000):
        automaton = Automaton([f"stop {number}"])
        matcher.acquire(automaton)
        matcher.release(automaton)
        known.append(weakref.ref(automaton))
        del automaton
    gc.collect()
    kept = [each() is not None for each in known]
    assert kept[-1]
    assert sum(kept) <= 256


def test_a_vocabulary_of_128k_tokens_keeps_its_rows_within_bounds():
    size = 131072
    matcher = StopMatcher([bytes([token % 251]) for token in range(size)], size, row_misses=1)
    automaton = Automaton(["".join(chr(33 + index % 90) for index in range(1000))])
    base = matcher.acquire(automaton)
    for local in range(0, 1000, 3):
        matcher.advance(np.array([base + local], np.int32), np.array([40]))
    assert 50 * 1024 * 1024 < matcher.nbytes <= 65 * 1024 * 1024


@given(st.lists(st.frozensets(st.integers(0, 99), max_size=5), max_size=20), st.data())
def test_stop_tokens_are_sets(sets, data):
    stop = StopTokens(100)
    rows = [stop.acquire(tokens, 1) for tokens in sets]
    dropped = set(data.draw(st.lists(st.sampled_from(range(len(sets))), unique=True))) if sets else set()
    for index in dropped:
        stop.release(sets[index])
    for index, tokens in enumerate(sets):
        if index not in dropped:
            found = stop.contain(np.full(100, rows[index]), np.arange(100))
            assert set(np.flatnonzero(found).tolist()) == set(tokens)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
def test_an_arena_never_gives_a_range_twice(moves):
    arena, taken = Arena(), []
    for give, length in moves:
        if give and taken:
            arena.give(*taken.pop(length % len(taken)))
        else:
            taken.append((arena.take(length), length))
        indexes = [index for start, size in taken for index in range(start, start + size)]
        assert len(set(indexes)) == len(indexes) == arena.used
        assert not indexes or max(indexes) < arena.size
