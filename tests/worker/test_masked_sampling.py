"""What grammars rule out is never drawn, and else nothing changes: on a CPU, and by the GPU's kernels alike."""

import numpy as np
import pytest

from services.worker.step.output import Sampled
from tests.quick import quick_if
from tests.worker.interpreter import needs_triton
from tests.worker.test_sampling_kernels import VOCAB, Case, assert_same, hot, told_apart

ON_CPU = Case.on_cpu
RUNS = [ON_CPU, Case.fused]
pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]
ADJUSTED = {
    "logit_bias_token_ids": np.array([7, 1030, 2500]),
    "logit_bias_values": np.array([5, -5, 9], np.float32),
    "repetition_penalty": 1.4,
    "presence_penalty": 0.7,
}
KINDS = {
    "warm": {},
    "cut": {"top_k": 9, "top_p": 0.8, "min_p": 0.01},
    "adjusted": ADJUSTED,
    "adjusted and cut": ADJUSTED | {"top_k": 30, "top_p": 0.5},
    "told": {"logprobs": True, "top_logprobs": 3},
    "everything": ADJUSTED | {"top_p": 0.7, "min_p": 0.02, "logprobs": True, "top_logprobs": 5},
}
SOME_KINDS = quick_if(lambda sampling: ADJUSTED.keys().isdisjoint(sampling), KINDS.values())
OTHER_KINDS = [KINDS["warm"], KINDS["adjusted"], KINDS["adjusted and cut"], KINDS["told"]]


def guided(count: int, vocab: int = VOCAB, allowed=(1, 3, 40, 700), **sampling) -> Case:
    """Slots 0, 2, ... have a grammar that allows so many tokens, in turn, and every eighth is greedy."""
    rows = [row if slot % 2 else row | {"grammar": "some"} for slot, row in enumerate(hot(count, **sampling))]
    for row in rows[::8]:
        row["temperature"] = 0.0
    case = Case(rows, vocab)
    random = np.random.default_rng(1)
    for slot in range(0, count, 2):
        tokens = random.choice(vocab, min(vocab, allowed[slot // 2 % len(allowed)]), replace=False)
        allow(case, slot, tokens)
    return case


def allow(case: Case, slot: int, tokens) -> None:
    """Nothing but ``tokens``."""
    bools = np.zeros(case.bits.shape[1] * 32, bool)
    bools[tokens] = True
    case.bits[slot] = np.packbits(bools, bitorder="little").view(np.int32)


def allowed_tokens(case: Case, slot: int) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(case.bits[slot].view(np.uint8), bitorder="little")).tolist())


def chosen(case: Case, sampled: Sampled) -> dict[int, int]:
    return dict(zip(sampled.slots.tolist(), sampled.token_ids.tolist(), strict=True))


@pytest.mark.parametrize("sampling", SOME_KINDS, ids=KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_nothing_else_is_drawn(run, sampling):
    case = guided(16, **sampling)
    found = run(case)
    assert found.finite.all()
    for slot, token in chosen(case, found).items():
        assert slot % 2 or token in allowed_tokens(case, slot)


@pytest.mark.parametrize("sampling", quick_if(lambda sampling: sampling in OTHER_KINDS, KINDS.values()), ids=KINDS)
@pytest.mark.parametrize("vocab", [90, pytest.param(VOCAB, marks=pytest.mark.slow)])
def test_the_kernels_draw_what_the_cpu_draws(vocab, sampling):
    if vocab < 2600 and "logit_bias_token_ids" in sampling:
        sampling = sampling | {"logit_bias_token_ids": np.array([7, 30, 89])}
    case = guided(16, vocab, **sampling)
    expected = case.on_cpu()
    assert_same(case.fused(), expected)
    assert_same(case.fused(padding=9, slice_elements=16 * vocab, chunk_rows=3), expected)


@pytest.mark.parametrize("sampling", KINDS.values(), ids=KINDS)
def test_a_mask_is_as_a_bias_that_rules_all_else_out(sampling):
    """The same noise, and the same order of things; but log-probabilities know nothing of a mask."""
    case, other = guided(24, **sampling), guided(24, **sampling)
    for slot in range(0, 24, 2):
        other.table.masked[slot] = False
        others = np.setdiff1d(np.arange(VOCAB), sorted(allowed_tokens(case, slot)))
        ids, values = other.table.biases.get(slot, (np.empty(0, np.int64), np.empty(0, np.float32)))
        biases = np.concatenate([ids, others]), np.concatenate([values, np.full(len(others), -1e5, np.float32)])
        other.table.biased[slot], other.table.biases[slot] = True, biases
    assert chosen(case, case.on_cpu()) == chosen(other, other.on_cpu())


@pytest.mark.parametrize("sampling", SOME_KINDS, ids=KINDS)
@pytest.mark.parametrize("run", RUNS)
def test_a_mask_that_allows_everything_changes_nothing(run, sampling):
    case, free = guided(24, **sampling), guided(24, **sampling)
    case.bits[:] = -1
    free.table.masked[:] = False
    assert_same(run(case), ON_CPU(free))


@pytest.mark.parametrize("run", RUNS)
def test_log_probabilities_are_those_of_the_model(run):
    case, free = guided(24, logprobs=True, top_logprobs=3), guided(24, logprobs=True, top_logprobs=3)
    free.table.masked[:] = False
    found, expected = run(case), ON_CPU(free)
    apart = told_apart(expected)
    assert found.top.token_ids[apart].tolist() == expected.top.token_ids[apart].tolist()
    np.testing.assert_allclose(found.top.logprobs, expected.top.logprobs, atol=2e-5)
    logprobs = case.logits.float().log_softmax(-1)
    own = [float(logprobs[row, token]) for row, token in enumerate(found.token_ids.tolist())]
    np.testing.assert_allclose(found.logprobs, own, atol=2e-5)


@pytest.mark.parametrize("temperature", [1e-7, 1.0, 1e30])
@pytest.mark.parametrize("run", RUNS)
def test_at_no_temperature_anything_else_is_drawn(run, temperature):
    case = guided(16)
    case.table.temperature[:] = temperature
    for slot, token in chosen(case, run(case)).items():
        assert slot % 2 or token in allowed_tokens(case, slot)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("run", RUNS)
def test_logits_that_are_not_numbers_are_seen_behind_a_mask_as_well(run, bad):
    case = guided(8, allowed=(3,), top_p=0.8, logprobs=True)
    for row, slot in enumerate(case.slots.tolist()):
        inside = sorted(allowed_tokens(case, slot))[0]
        outside = (inside + 1) % VOCAB if slot % 4 else inside
        if slot < 4:
            case.logits[row, outside] = bad
    found = run(case)
    assert found.finite.tolist() == [slot >= 4 for slot in case.slots.tolist()]
    if run is not ON_CPU:
        assert not found.token_ids[~found.finite].any()
