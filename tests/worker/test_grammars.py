"""Sequences follow their grammars on a CPU, and nobody else notices."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLParserLimits

from services.common.plan.types import Admission
from services.common.text import grammar as common
from services.common.text.grammar import Grammars
from services.common.text.tokenizer import Tokenizer
from services.worker.sampling.grammars import RowMasks, SlotGrammars
from tests.properties import examples
from tests.worker.driver import Driver, admission, batch
from tests.worker.grammars import BROKEN, LISTS, OBJECTS, WORDS, answer, ascii_grammars, ascii_tokenizer, follows
from tests.worker.test_generation import prompt_of

END = 1  # of the checkpoints' tokenizer
STEPS = 48


@pytest.fixture(scope="module")
def tokenizer(checkpoint) -> Tokenizer:
    return Tokenizer.load(str(checkpoint()))


def closing(tokenizer: Tokenizer) -> dict:
    """A bias without which lists of a random model hardly ever end."""
    token_ids = np.array([*tokenizer.encode("]["), END])
    return {"logit_bias_token_ids": token_ids, "logit_bias_values": np.array([5, -9, 5], np.float32)}


SAMPLING = {
    "greedy": {},
    "hot": {"temperature": 1.5, "seed": 7},
    "cut": {"temperature": 1.0, "seed": 3, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "with logprobs": {"temperature": 0.7, "seed": 5, "logprobs": True, "top_logprobs": 4},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("grammar", [WORDS, OBJECTS, LISTS], ids=["regex", "schema", "context-free"])
def test_answers_match(grammar, sampling, runner_for, tokenizer):
    driver = runner_for()
    if grammar == LISTS:
        sampling = sampling | closing(tokenizer)
    found = driver.generate([prompt_of(9, 1), prompt_of(20, 2)], STEPS, grammar=grammar, **sampling)
    for tokens in found:
        text = answer(tokenizer, tokens, {END})
        assert text is not None, tokenizer.decode(tokens)
        assert follows(grammar, text), text


@pytest.mark.parametrize("threads", [1, 2])
def test_company_changes_nothing(threads, runner_for, checkpoint):
    """Beside rows with other grammars and with none, and cut over threads."""
    driver = runner_for(torch_num_threads=threads)
    kinds = [{"grammar": WORDS}, {}, {"grammar": OBJECTS, "logprobs": True}, {"grammar": LISTS}, {"logprobs": True}]
    sampling = [kind | {"temperature": 0.9, "seed": row} for row, kind in enumerate(kinds * 8)]
    prompts = [prompt_of(5 + row, row) for row in range(len(sampling))]
    alone = []
    for prompt, kind in zip(prompts, sampling, strict=True):
        driver.reset()
        alone += driver.generate([prompt], 6, **kind)
    driver.reset()
    admissions = tuple(
        admission(row, prompts[row], [4 * row, 4 * row + 1, 4 * row + 2, 4 * row + 3], **sampling[row])
        for row in range(len(prompts))
    )
    rows = range(len(prompts))
    driver.run(admissions=admissions, batch=batch(rows, [len(prompt) for prompt in prompts]))
    for _ in range(5):
        driver.run(batch=batch(rows))
    assert [driver.tokens[row] for row in rows] == alone


def test_samples_of_one_grammar_differ_and_it_is_compiled_once(runner_for, tokenizer, monkeypatch):
    compiled, matcher = [], Grammars.matcher

    def counted(self, grammar):
        compiled.append(threading.current_thread().name)
        return matcher(self, grammar)

    monkeypatch.setattr(Grammars, "matcher", counted)
    driver, prompt, count = runner_for(), prompt_of(12), 8
    grammar = WORDS + " // of its own"
    admissions = tuple(
        admission(row, prompt, [3 * row, 3 * row + 1, 3 * row + 2], temperature=1.5, sample_index=row, grammar=grammar)
        for row in range(count)
    )
    driver.run(admissions=admissions, batch=batch(range(count), [len(prompt)] * count))
    for _ in range(30):
        driver.run(batch=batch(range(count)))
    texts = [answer(tokenizer, driver.tokens[row], {END}) for row in range(count)]
    assert all(text is not None and follows(WORDS, text) for text in texts)
    assert len(set(texts)) > count // 2
    assert len(compiled) == 1
    assert "compute" not in compiled[0]


def test_log_probabilities_are_the_models_own(runner_for, checkpoint, reference):
    driver, prompt = runner_for(), prompt_of(9)
    (tokens,) = driver.generate([prompt], 10, grammar=OBJECTS, temperature=1.0, logprobs=True)
    with torch.inference_mode():
        logits = reference(checkpoint())(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.log_softmax(-1)[torch.arange(10), torch.tensor(tokens)]
    assert driver.logprobs[0] == pytest.approx(chosen.tolist(), abs=1e-4)


def test_most_likely_tokens_are_told_though_they_cannot_come(runner_for):
    driver, prompt = runner_for(), prompt_of(9)
    (free,) = driver.generate([prompt], 1)
    driver.reset()
    asked = admission(0, prompt, [0], grammar=OBJECTS, logprobs=True, top_logprobs=2)
    sampled = driver.run(admissions=(asked,), batch=batch([0], [9])).sampled
    assert sampled.top.token_ids[0] == free[0] != sampled.token_ids[0]
    assert sampled.logprobs[0] < sampled.top.logprobs[0]


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("said", [1, 4, STEPS - 1])
def test_what_is_resumed_goes_on_as_if_it_had_not_stopped(said, sampling, runner_for):
    driver, prompt = runner_for(), prompt_of(9)
    (whole,) = driver.generate([prompt], STEPS, grammar=OBJECTS, **sampling)
    driver.reset()
    fresh = admission(3, prompt + whole[:said], range(5), grammar=OBJECTS, **sampling)
    resumed = dataclasses.replace(fresh, prompt_tokens=len(prompt))
    driver.run(admissions=(resumed,), batch=batch([3], [len(prompt) + said]))
    while len(driver.tokens[3]) < STEPS - said:
        driver.run(batch=batch([3]))
    assert driver.tokens[3] == whole[said:]


def test_behind_its_end_any_token_may_come(runner_for, checkpoint):
    """What a sequence gives there is what it would without a grammar."""
    driver, prompt = runner_for(), prompt_of(9)
    (tokens,) = driver.generate([prompt], 12, grammar='start: "a"')
    end = tokens.index(END)
    driver.reset()
    (free,) = driver.generate([prompt + tokens[: end + 1]], 12 - end - 1)
    assert tokens[end + 1 :] == free


def test_a_slot_that_is_used_again_follows_nothing_of_before(runner_for):
    driver, prompt = runner_for(), prompt_of(9)
    (free,) = driver.generate([prompt], 3)
    driver.reset()
    driver.run(admissions=(admission(0, prompt, [0], grammar=WORDS),), batch=batch([0], [9]))
    driver.run(releases=[0], admissions=(admission(0, prompt, [1], grammar=OBJECTS),), batch=batch([0], [9]))
    driver.tokens.clear()
    driver.run(releases=[0], admissions=(admission(0, prompt, [2]),), batch=batch([0], [9]))
    for _ in range(2):
        driver.run(batch=batch([0]))
    assert driver.tokens[0] == free


def run_beside_a_good_one(driver: Driver, bad: Admission, steps: int) -> list:
    """Outputs of steps with ``bad`` in slot 1 and a sequence that follows ``OBJECTS`` in slot 0."""
    good = admission(0, prompt_of(9), [0, 1, 2, 3], grammar=OBJECTS)
    outputs = [driver.run(admissions=(good, bad), batch=batch([0, 1], [9, len(bad.token_ids)]))]
    return outputs + [driver.run(batch=batch([0, 1])) for _ in range(steps - 1)]


def test_a_grammar_that_cannot_be_compiled_fails_its_slot_alone(runner_for):
    driver = runner_for()
    (expected,) = driver.generate([prompt_of(9)], 5, grammar=OBJECTS)
    driver.reset()
    for output in run_beside_a_good_one(driver, admission(1, prompt_of(4), [10], grammar=BROKEN), 5):
        assert output.sampled.finite.tolist() == [True, False]
        assert list(output.failures) == [1]
        assert output.failures[1].message.startswith("the grammar cannot be followed: ")
        assert "Expected token ')'" in output.failures[1].message
        assert not output.to_result().failures[0].forbidden
    assert driver.tokens[0] == expected
    again = admission(1, prompt_of(4), [11], grammar=WORDS)
    output = driver.run(releases=[1], admissions=(again,), batch=batch([0, 1], [1, 4]))
    assert output.sampled.finite.all()
    assert output.failures == {}


def test_a_grammar_that_takes_too_much_work_in_a_step_fails_its_slot_alone(runner_for, tokenizer, monkeypatch):
    """Here with every further character, since it may be cut in more and more ways."""
    monkeypatch.setattr(common, "LIMITS", LLParserLimits(step_max_items=60, verbose_errors=False))
    never_ends = {"logit_bias_token_ids": np.array([END]), "logit_bias_values": np.array([-100], np.float32)}
    hard = admission(1, prompt_of(4), [10, 11, 12], grammar='start: x x x x x x\nx: "a" | x x | ""', **never_ends)
    outputs = run_beside_a_good_one(runner_for(), hard, 30)
    first = next(step for step, output in enumerate(outputs) if output.failures)
    assert 0 < first < 29
    for step, output in enumerate(outputs):
        assert output.sampled.finite.tolist() == [True, step < first]
    assert outputs[-1].failures == outputs[first].failures
    assert "Too many items" in outputs[first].failures[1].message


def test_a_sequence_that_is_resumed_off_its_grammar_fails(runner_for, tokenizer):
    said = tokenizer.encode("zz")
    fresh = admission(1, prompt_of(4) + said, [10], grammar=WORDS)
    resumed = dataclasses.replace(fresh, prompt_tokens=4)
    for output in run_beside_a_good_one(runner_for(), resumed, 2):
        assert output.sampled.finite.tolist() == [True, False]
        assert "what was generated before does not match" in output.failures[1].message
        failure = output.to_result().failures[0]
        assert (failure.slot, failure.forbidden) == (1, True)


def test_logits_that_are_not_numbers_are_the_reason_also_with_a_grammar(runner_for):
    driver = runner_for()
    driver.run(admissions=(admission(0, prompt_of(9), [0, 1], grammar=WORDS),), batch=batch([0], [9]))
    cache = driver.runner.cache
    kept = cache.keys[0][0].clone()
    cache.keys[0][0].fill_(float("nan"))
    outputs = [driver.run(batch=batch([0])) for _ in range(2)]
    cache.keys[0][0].copy_(kept)
    assert [output.sampled.finite.tolist() for output in outputs] == [[False], [False]]
    assert [dict(output.failures) for output in outputs] == [{}, {}]


def masks_of(grammars: SlotGrammars, *slots: int, vocab_size: int = 96) -> np.ndarray:
    """Return which tokens each slot allows, ``[slots, vocab_size]``."""
    return RowMasks(np.arange(len(slots)), grammars.masks(np.array(slots))).allowed(vocab_size)


@pytest.fixture
def ascii_slots():
    grammars = SlotGrammars(ascii_grammars(), 96)
    yield grammars
    grammars.close()


class _Plan:
    """As much of a plan as grammars look at."""

    def __init__(self, *admissions: Admission, releases=()) -> None:
        self.admissions, self.releases = admissions, np.array(releases, np.int64)


@pytest.mark.hypothesis
def test_a_mask_allows_what_the_grammar_accepts_and_nothing_else(ascii_slots):
    """Wherever a walk through the grammar has led."""

    @settings(derandomize=True, max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from([WORDS, LISTS, OBJECTS]), st.lists(st.integers(0, 95), max_size=30))
    def check(grammar, choices):
        ascii_slots.clear()
        ascii_slots.apply(_Plan(admission(5, [7], [0], grammar=grammar)))
        walked, judge = [], ascii_grammars().matcher(grammar)
        for choice in choices:
            [allowed] = masks_of(ascii_slots, 5)
            accepted = [judge.deep_copy().consume_token(token) for token in range(96)]
            assert allowed.tolist() == accepted, ascii_tokenizer().decode(walked)
            token = int(np.resize(np.flatnonzero(allowed), 96)[choice])
            ascii_slots.consume(np.array([5]), np.array([token]))
            walked.append(token)
            if token == 0:
                assert follows(grammar, answer(ascii_tokenizer(), walked, {0}))
                assert masks_of(ascii_slots, 5).all()
                break
            judge.consume_token(token)

    check()


@pytest.mark.parametrize("vocab_size", [70, 96, 130])
def test_a_model_may_have_fewer_tokens_than_its_tokenizer_or_more(vocab_size):
    grammars = SlotGrammars(ascii_grammars(), vocab_size)
    kinds = "start: /[a-z]/", 'start: "z"'
    grammars.apply(_Plan(*(admission(slot, [7], [0], grammar=kind) for slot, kind in enumerate(kinds))))
    masks = masks_of(grammars, 1, 0, vocab_size=vocab_size)
    letters = [token for token in range(66, 92) if token < vocab_size]
    assert np.flatnonzero(masks[1]).tolist() == letters
    missing = vocab_size <= 91  # "z" is not among the model's tokens
    assert list(grammars.failures(np.array([0, 1]))) == ([1] if missing else [])
    if missing:
        assert "no token of this model may come next" in grammars.failures(np.array([1]))[1].message
    grammars.close()


def test_a_token_that_ends_a_sequence_is_no_text_of_an_answer():
    """Though it has some: the answer would end there, whatever the grammar still wants."""
    first, second = ascii_tokenizer().encode("ab")
    grammars = SlotGrammars(Grammars(ascii_tokenizer(), [0, first]), 96)
    grammars.apply(Driver(None).plan(admissions=(admission(0, [5], [0], grammar="start: /[ab]{2}/"),)))
    slot = np.zeros(1, np.int64)
    for expected in ([second], [second], [0, first]):
        assert np.flatnonzero(masks_of(grammars, 0)[0]).tolist() == sorted(expected)
        grammars.consume(slot, np.array([second]))
    grammars.close()


def test_masks_are_found_by_rows():
    masks = RowMasks(np.array([1, 4, 5]), np.array([[1], [2], [3]], np.int32))
    assert masks.within(2, 4) is None
    inside = masks.within(4, 8)
    assert inside.rows.tolist() == [0, 1]
    assert inside.bits.tolist() == [[2], [3]]
    assert np.flatnonzero(masks.allowed(40)[2]).tolist() == [0, 1]
