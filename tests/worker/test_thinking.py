"""A thinking budget ends a reasoning section at its last token, on a CPU and by the GPU's kernels alike."""

import dataclasses

import numpy as np
import pytest
import torch

from services.worker.step.slots import OPENING_TOKENS
from tests.worker.driver import Driver, admission, batch, budget
from tests.worker.interpreter import needs_triton
from tests.worker.no_streams import device_without_streams
from tests.worker.test_cuda_steps import config, cuda, plain
from tests.worker.test_masked_sampling import allow
from tests.worker.test_sampling_kernels import Case, assert_same, hot
from tokasaurus.common.v1.sampling_pb2 import ThinkingBudget

__all__ = ["config", "cuda", "device_without_streams", "plain"]

RUNS = [Case.on_cpu, Case.fused]
pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]
BEGIN, END = 40, 41
GENERATED = 5  # tokens of each slot of a case, behind eight of its prompt


def case_of(answers: list[list[int]], budgets: list[ThinkingBudget], **sampling) -> Case:
    """Slot i has ``answers[i]``, of ``GENERATED`` tokens, behind its prompt."""
    rows = [row | {"thinking": each} for row, each in zip(hot(len(budgets), **sampling), budgets, strict=True)]
    case = Case(rows)
    case.table.prompt_tokens[:] = 8
    for slot, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        case.table.release(np.array([slot]))
        admitted = admission(slot, range(13), [3 * slot + 2, 3 * slot], **row)
        case.table.admit(dataclasses.replace(admitted, prompt_tokens=8))
        case.tokens[3 * slot, :GENERATED] = torch.tensor(answer)
    return case


OPENED = [
    ([1, 2, 3, 4, 5], 5, True),
    ([1, 2, 3, 4, 5], 6, False),  # one more is left
    ([1, 2, END, 4, 5], 5, False),  # the section has ended
    ([1, 2, 3, 4, END], 5, False),
    ([BEGIN, 2, 3, 4, 5], 5, True),  # it counts like any other
]
BEGUN = [
    ([BEGIN, 2, 3, 4, 5], 4, True),
    ([BEGIN, 2, 3, 4, 5], 5, False),
    ([1, BEGIN, 3, 4, 5], 3, True),  # behind white space
    ([1, BEGIN, 3, 4, 5], 4, False),
    ([BEGIN, BEGIN, 3, 4, 5], 4, True),
    ([END, BEGIN, 3, 4, 5], 3, True),
    ([BEGIN, END, 3, 4, 5], 4, False),
    ([1, 2, 3, 4, 5], 3, False),  # no section
]
TABLE = [(answer, budget(tokens, END), due) for answer, tokens, due in OPENED]
TABLE += [(answer, budget(tokens, END, BEGIN), due) for answer, tokens, due in BEGUN]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_k": 5, "top_p": 0.9}, {"repetition_penalty": 1.5, "presence_penalty": 1.0}, {"temperature": 0.0}],
)
@pytest.mark.parametrize("run", RUNS)
def test_the_end_is_forced_where_an_open_section_has_used_its_budget(run, sampling):
    answers, budgets, due = zip(*TABLE, strict=True)
    case, free = case_of(answers, budgets, **sampling), case_of(answers, budgets, **sampling)
    free.table.release(np.arange(len(due)))  # without budgets; the other settings stay
    expected = np.where(np.array(due)[case.slots], END, free.on_cpu().token_ids)
    assert run(case).token_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("run", RUNS)
def test_log_probabilities_of_a_forced_token(run, processed):
    """Raw: the model's own. Processed: it is certain, and the only one."""
    budgets = [budget(5, END)] * 4
    sampling = {"logprobs": True, "top_logprobs": 3, "processed_logprobs": processed}
    case = case_of([[1, 2, 3, 4, 5]] * 4, budgets, **sampling)
    found, own = run(case), case.logits.float().log_softmax(-1)
    if processed:
        assert found.logprobs.tolist() == [0.0] * 4
        assert (found.top.counts.tolist(), found.top.token_ids.tolist()) == ([1] * 4, [END] * 4)
    else:
        np.testing.assert_allclose(found.logprobs, own[:, END], atol=2e-5)
        assert found.top.counts.tolist() == [3] * 4


@pytest.mark.parametrize("run", RUNS)
def test_a_grammar_comes_first_and_the_token_as_soon_as_it_may(run):
    """Such as at the end of a character whose first byte has been generated."""
    budgets = [budget(tokens, END) for tokens in (5, 5, 4, 1, 0)]
    case = case_of([[1, 2, 3, 4, 5]] * 5, budgets, grammar="some")
    for slot, tokens in enumerate([[7, 8], [7, END], [7, END], [7, END], [7]]):
        allow(case, slot, tokens)
    found = dict(zip(case.slots.tolist(), run(case).token_ids.tolist(), strict=True))
    assert found[0] in (7, 8)
    assert [found[slot] for slot in (1, 2, 3)] == [END] * 3
    assert found[4] == 7


def test_the_kernels_do_what_the_cpu_does_in_any_slices():
    answers, budgets, _ = zip(*TABLE, strict=True)
    case = case_of(answers, budgets, logprobs=True, top_logprobs=2, top_k=9)
    expected = case.on_cpu()
    assert_same(case.fused(), expected)
    assert_same(case.fused(padding=5, slice_elements=16 * case.vocab, chunk_rows=3), expected)


def think(driver: Driver, limit: ThinkingBudget | None, count: int = 24, generated=(), **sampling) -> list[int]:
    """``count`` tokens of an answer whose first ones, ``generated``, an earlier worker made."""
    driver.reset()
    tokens = [5, 6, 7, *generated]
    admitted = admission(2, tokens, range(12), thinking=limit, temperature=0.9, seed=1, **sampling)
    admitted = dataclasses.replace(admitted, prompt_tokens=3)
    beside = admission(0, [9, 10], range(20, 32), temperature=0.8)
    driver.run(admissions=(admitted, beside), batch=batch([2, 0], [len(tokens), 2]))
    for _ in range(count - len(generated) - 1):
        driver.run(batch=batch([2, 0]))
    return [*generated, *driver.tokens[2]]


@pytest.mark.parametrize("graphs", [None, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (0, 8))])
def test_an_answer_goes_on_behind_the_end_of_its_thoughts(plain, cuda, graphs):
    """Up to the forced token it is what it is without a budget, and a budget that is not reached changes nothing."""
    driver = plain if graphs is None else cuda(graphs)
    free = think(driver, None)
    end = next(token for token in range(96) if token not in free)
    for tokens in (0, 1, 7, 22):
        answer = think(driver, budget(tokens, end))
        assert answer[: tokens + 1] == [*free[:tokens], end]
        assert len(answer) == 24
    assert think(driver, budget(24, end)) == free
    by_itself = free[4]
    assert think(driver, budget(free.index(by_itself) + 1, by_itself)) == free


@pytest.mark.slow
def test_the_same_answers_however_steps_are_launched(plain, cuda):
    expected = think(plain, budget(9, 3, begin_token_id=4), logprobs=True)
    for graphs in (0, 8):
        assert think(cuda(graphs), budget(9, 3, begin_token_id=4), logprobs=True) == expected


@pytest.mark.parametrize("kept", [1, 6, 7, 8, 15])
def test_tokens_from_before_a_resumption_count(plain, kept):
    free = think(plain, None)
    end = next(token for token in range(96) if token not in free)
    whole = think(plain, budget(7, end))
    assert think(plain, budget(7, end), generated=whole[:kept]) == whole


def test_a_section_may_begin_among_the_first_tokens_only(plain):
    free = think(plain, None)
    end = next(token for token in range(96) if token not in free)
    firsts = {token: free.index(token) for token in free}
    within = next(token for token, place in firsts.items() if 0 < place < OPENING_TOKENS)
    beyond = next(token for token, place in firsts.items() if place >= OPENING_TOKENS)
    answer = think(plain, budget(3, end, begin_token_id=within))
    assert answer.index(end) == firsts[within] + 4
    assert think(plain, budget(3, end, begin_token_id=beyond)) == free


def test_a_row_without_open_questions_stays_on_the_plain_path(plain):
    """Only the step at which the budget is used up is another one."""
    think(plain, budget(7, 3), count=1)
    table, slots = plain.runner._slots, np.array([2])
    assert [position for position in range(3, 30) if not table.may_force(slots, np.array([position])).any()] == [
        position for position in range(3, 30) if position != 10
    ]
    plain.run(releases=[2], batch=batch([0]))
    assert table.budgets == 0
    assert not table.may_force(slots, np.array([10])).any()
