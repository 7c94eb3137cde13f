"""Which prompt tokens a step on a GPU scores, and what the GPU's runner makes of them: what the CPU's does."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.plan.types import NO_GROUPS, Batch, WorkerLimits
from services.worker.runner.cuda.inputs import build
from services.worker.runner.cuda.scores import StepScores, find_runs
from services.worker.sampling.prompt_logprobs import score_rows
from services.worker.step.slots import SlotTable
from tests.properties import examples
from tests.worker.driver import Driver, admission, batch
from tests.worker.interpreter import needs_triton
from tests.worker.no_streams import device_without_streams
from tests.worker.scores import same_scores
from tests.worker.test_cuda_steps import config, cuda, plain

__all__ = ["config", "cuda", "device_without_streams", "plain"]

PAGE, SLOTS = 4, 8


@st.composite
def steps(draw):
    """A table of slots in any state, some of which ask, and a batch over some of them."""
    table = SlotTable(WorkerLimits(PAGE, 64, SLOTS, 256, 64, 100, 5), torch.device("cpu"))
    rows, counts = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))], []
    for slot in rows:
        known, top = draw(st.integers(1, 12)), draw(st.sampled_from([None, 0, 3]))
        start = {"prompt_logprobs_start": draw(st.integers(0, 11))}
        admitted = admission(slot, np.arange(known) + 20 * slot, np.arange(6), prompt_logprobs=top, **start)
        table.admit(dataclasses.replace(admitted, prompt_tokens=draw(st.integers(0, known))))
        if draw(st.booleans()):  # past what came with it
            table.known[slot] = known + 1
            table.computed[slot], table.prompts[slot] = known, None
        else:
            table.computed[slot] = draw(st.integers(0, known - 1))
        counts.append(draw(st.integers(1, int(table.known[slot] - table.computed[slot]))))
    return table, Batch(np.array(rows), np.array(counts))


@given(steps())
@settings(max_examples=examples(200))
def test_a_step_scores_what_a_walk_over_its_rows_gives(step):
    table, rows = step
    arrays, runs, found = build(rows, NO_GROUPS, table, PAGE), find_runs(rows, table), []
    where = {pair: at for at, pair in enumerate(zip(arrays.token_slots, arrays.positions, strict=True))}
    for slot, count in zip(rows.slots.tolist(), rows.token_counts.tolist(), strict=True):
        begin, top = int(table.computed[slot]), int(table.prompt_logprobs[slot])
        first, stop = table.prompt_start[slot], table.prompt_tokens[slot]
        places = [place for place in range(begin, begin + count) if first <= place + 1 < stop]
        if top >= 0 and places:
            found.append((slot, places[0] + 1, top, [(where[slot, at], 20 * slot + at + 1) for at in places]))
    if runs is None:
        assert not found
        return
    pairs = list(zip(runs.tokens.tolist(), runs.token_ids.tolist(), strict=True))
    for run, (slot, start, top, expected) in zip(runs.runs, found, strict=True):
        assert (run.slot, run.start, run.top) == (slot, start, top)
        assert pairs[: run.count] == expected
        del pairs[: run.count]
    assert not pairs
    assert runs.widest == max(top for _, _, top, _ in found)
    # A row that samples does so from another token, so there is a choice of tokens to add to.
    assert arrays.keep is not None
    assert not set(arrays.keep.tolist()) & set(runs.tokens.tolist())


def test_a_sequence_whose_logits_are_not_numbers_fails():
    table = SlotTable(WorkerLimits(PAGE, 64, SLOTS, 256, 64, 100, 5), torch.device("cpu"))
    for slot in (1, 2):
        table.admit(admission(slot, [5, 6, 7], [slot], prompt_logprobs=slot))
    runs = find_runs(batch([1, 2], [3, 2]), table)
    logits = torch.randn(5, 100)
    logits[1] = torch.nan
    found = score_rows(logits, lambda rows: rows, torch.from_numpy(runs.token_ids[:4]), runs.widest, 90, 3)
    failed = np.zeros(SLOTS, bool)
    first, second = StepScores(runs.runs, found).collect(failed)
    assert np.flatnonzero(failed).tolist() == [1]
    assert (first.top.counts.tolist(), second.top.counts.tolist()) == ([1, 1], [2, 2])
    assert second.top.token_ids.max() < 90  # what is behind the vocabulary is no token


def run_history(driver: Driver) -> list:
    """Prompts in chunks of several tokens and of one, beside a row that decodes: slot 1 asks for three tokens beside
    each, slot 2 for none, slot 3 goes on with tokens that it once generated, slot 4 has a cached prefix."""
    driver.reset()
    long = [(7 * place) % 90 for place in range(41)]
    later = {"prompt_logprobs": 2, "prompt_logprobs_start": 25}
    wanted = admission(1, long, range(20, 31), prompt_logprobs=3, temperature=0.9, repetition_penalty=1.5)
    resumed = admission(3, range(60, 74), range(40, 44), prompt_logprobs=2)
    resumed = dataclasses.replace(resumed, prompt_tokens=9)
    cached = admission(4, long[:30], [*range(20, 25), *range(50, 53)], cached_tokens=20, prompt_logprobs=1)
    bias = {"logit_bias_token_ids": np.array([5]), "logit_bias_values": np.array([50.0], np.float32), "logprobs": True}
    alone = admission(5, [3, 4, 5, 6], [60], prompt_logprobs=5, **bias)
    return [
        driver.run(admissions=(admission(0, [5, 6], [0, 1, 2]),), batch=batch([0], [2])),
        driver.run(admissions=(wanted,), batch=batch([1, 0], [20, 1])),
        driver.run(admissions=(admission(2, range(80, 86), [35, 36], prompt_logprobs=0),), batch=batch([0, 2, 1])),
        driver.run(admissions=(resumed, cached), batch=batch([4, 2, 0, 3, 1], [3, 1, 1, 7, 19])),
        driver.run(batch=batch([1, 4, 3, 2, 0], [1, 7, 7, 4, 1])),
        driver.run(batch=batch([4, 3, 2, 1, 0])),
        driver.run(releases=[1], admissions=(alone,), batch=batch([5], [3])),  # nothing samples
        driver.run(batch=batch([5])),
        driver.run(admissions=(admission(6, long, range(70, 81), **later),), batch=batch([6], [24])),  # nothing yet
        driver.run(batch=batch([6], [10])),
        driver.run(batch=batch([6], [7])),
    ]


@needs_triton
@pytest.mark.usefixtures("triton_ready", "device_without_streams")
@pytest.mark.parametrize("elements", [1, pytest.param(16 * 1024 * 1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("graphs", [0, pytest.param(8, marks=pytest.mark.slow)])
def test_the_same_scores_as_on_the_cpu(plain, cuda, graphs, elements, monkeypatch):
    from services.worker.sampling import fused

    monkeypatch.setattr(fused, "_SCORED_ELEMENTS", elements)
    expected, found = (run_history(driver) for driver in (plain, cuda(graphs)))
    same_scores(expected, found)
    for each, other in zip(expected, found, strict=True):
        assert other.sampled.slots.tolist() == each.sampled.slots.tolist()
        assert other.sampled.token_ids.tolist() == each.sampled.token_ids.tolist()
    assert [[part.slot for part in step.scored] for step in found[1:]] == [
        *([1], [2, 1], [4, 2, 3, 1], [4, 3, 2], [], [5], [], [], [6], [6]),
    ]
    assert [part.start for step in found for part in step.scored if part.slot == 6] == [25, 35]
