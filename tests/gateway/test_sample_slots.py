"""What a session keeps of its samples."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.engine.sample_slots import BLOCK_TOKENS, SampleSlots
from tests.properties import examples


def array(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK_TOKENS), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_every_sample_gets_its_own_tokens_back(lengths, random):
    slots = SampleSlots()
    for _ in range(2):  # the second time in used blocks
        first = slots.take(len(lengths), per_token=False)
        order = list(range(len(lengths)))
        for step in range(max(lengths)):
            random.shuffle(order)
            rows = np.array([row for row in order if step < lengths[row]], np.uint32)
            slots.store(rows + first, rows * 1000 + step)
        for row, length in enumerate(lengths):
            assert slots.give(first + row).tolist() == [row * 1000 + step for step in range(length)]


def test_more_tokens_than_there_are_blocks_and_more_samples_than_slots():
    slots = SampleSlots()
    count = 3 * len(slots.taken)
    first = slots.take(count, per_token=False)
    handles = np.arange(first, first + count, dtype=np.uint32)
    for token in range(2):
        slots.store(handles, np.full(count, token, np.uint32))
    assert slots.give(first + count - 1).tolist() == [0, 1]


def test_a_handle_is_given_again_only_when_it_is_free():
    slots = SampleSlots()
    size = len(slots.taken)
    kept = slots.take(1, per_token=False)
    taken = {kept}
    for _ in range(3 * size // 100):
        first = slots.take(100, per_token=False)
        fresh = set(range(first, first + 100))
        assert not fresh & taken
        for handle in fresh:
            slots.give(handle)
    assert len(slots.taken) == size


def test_what_got_none_or_is_not_taken_has_no_tokens():
    slots = SampleSlots()
    assert len(slots.give(slots.take(1, per_token=False))) == 0
    assert len(slots.give(7)) == 0
