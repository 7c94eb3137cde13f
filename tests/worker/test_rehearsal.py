"""The rehearsal consists of plans of every kind, which the worker accepts with any limits."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from services.common.plan.rules import check_plan
from services.common.plan.types import LastPlan, WorkerLimits
from services.worker.boot import rehearsal
from services.worker.runner.cuda.inputs import StepArrays, build, padded
from services.worker.sampling.rows import RowPreparer, RowSlice
from services.worker.step.slots import SlotTable

USUAL = WorkerLimits(16, 1000, 64, 256, 4096, 500, 20, hydragen=True)
LIMITS = {
    "usual": USUAL,
    "one slot": WorkerLimits(16, 1000, 1, 256, 4096, 500, 20, hydragen=True),
    "few tokens in a step": WorkerLimits(16, 1000, 64, 4, 4096, 500, 20, hydragen=True),
    "one token in a step": WorkerLimits(16, 1000, 64, 1, 4096, 500, 20, hydragen=True),
    "a cache of one page": WorkerLimits(16, 1, 64, 256, 16, 500, 20, hydragen=True),
    "contexts of one token": WorkerLimits(16, 1, 64, 256, 1, 500, 20, hydragen=True),
    "pages of one token": WorkerLimits(1, 1000, 64, 256, 1000, 500, 20, hydragen=True),
    "grammars": replace(USUAL, grammars=True),
    "a window in every layer": replace(USUAL, hydragen=False, window_tokens=40),
    "a small vocabulary": WorkerLimits(16, 1000, 64, 256, 4096, 7, 20, hydragen=True),
}


def run(limits: WorkerLimits, series) -> list[tuple[StepArrays, tuple[RowSlice, ...]]]:
    """Every step of ``series`` as the host of a GPU prepares it."""
    found, preparer = [], RowPreparer(16, 16)
    for plans in series:
        slots, last = SlotTable(limits, torch.device("cpu")), LastPlan()
        for plan in plans:
            check_plan(plan, last, slots, limits)
            for admission in plan.admissions:
                slots.admit(admission)
            last = last.followed_by(plan)
            arrays = build(last.batch, last.groups, slots, limits.page_size)
            count = len(arrays.sample_slots)
            rows = preparer.prepare(slots, arrays.sample_slots, arrays.sample_positions, torch.from_numpy, count)
            slots.advance(last.batch.slots, last.batch.token_counts, arrays.sample_slots)
            found.append((arrays, rows.slices))
    return found


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_every_plan_keeps_the_contract(limits):
    assert run(limits, rehearsal.every_kind(limits))
    assert run(limits, rehearsal.largest(limits))
    for tokens in (9, 128):
        run(limits, rehearsal.around(limits, tokens, 8))


def test_rows_are_cut_and_reported_with_and_without_changes_to_their_logits():
    """The kernels are others: they read logits as they are, or copies in float32."""
    slices = [part for _, parts in run(USUAL, rehearsal.every_kind(USUAL)) for part in parts]
    assert any(part.truncated is not None for part in slices)
    assert any(part.raw_logprobs is not None and part.raw_logprobs.with_top for part in slices)
    adjusted = [each for part in slices for each in part.adjusted]
    assert any(each.truncated is not None and each.raw_logprobs is not None for each in adjusted)
    assert any(each.biased is not None and each.penalised is not None for each in adjusted)


def test_processed_logprobs_and_forced_tokens_are_rehearsed_with_and_without_truncation():
    slices = [part for _, parts in run(USUAL, rehearsal.every_kind(USUAL)) for part in parts]
    processed = [each for part in slices for each in part.adjusted if each.processed_logprobs is not None]
    assert {each.truncated is not None for each in processed} == {False, True}
    assert {each.truncated is not None for each in processed if each.forced is not None} == {False, True}
    assert all(each.processed_logprobs.with_top for each in processed)


def test_rows_with_grammars_are_among_them_where_there_are_grammars():
    """Alone and beside all else; kernels differ by what is cut."""
    for grammars in (True, False):
        limits = replace(USUAL, grammars=grammars)
        slices = [part for _, parts in run(limits, rehearsal.every_kind(limits)) for part in parts]
        masked = [each for part in slices for each in part.adjusted if each.masked is not None]
        assert {each.truncated is not None for each in masked} == ({False, True} if grammars else set())
        unmasked = [each for part in slices for each in part.adjusted if each.masked is None]
        assert {each.truncated is not None for each in unmasked} == {False, True}
        largest = [
            each for _, parts in run(limits, rehearsal.largest(limits)) for part in parts for each in part.adjusted
        ]
        assert largest
        assert all((each.masked is not None) == grammars for each in largest)


def test_the_largest_steps_have_grammars_for_few_of_many_rows():
    limits = replace(USUAL, max_slots=256, max_tokens_per_step=512, grammars=True)
    [decoding, *_] = rehearsal.largest(limits)
    [admissions, *_] = [plan.admissions for plan in decoding]
    assert len(admissions) == 256
    assert {each.sampling.prompt_logprobs for each in admissions} == {20}
    assert 16 < sum(each.sampling.grammar != "" for each in admissions) < 128


@pytest.mark.parametrize("grouped", [False, True])
def test_rows_of_long_contexts_run_alone_and_beside_a_chunk(grouped):
    """Several programs share such a row: kernels of their own."""
    long = [
        arrays
        for arrays, _ in run(USUAL, rehearsal.every_kind(USUAL))
        if arrays.longest == USUAL.max_context_tokens and (arrays.groups is not None) == grouped
    ]
    assert {arrays.chunks is not None for arrays in long} == {False, True}
    assert all(np.all(arrays.positions >= 0) for arrays in long)


def test_another_way_to_exchange_is_rehearsed_on_both_sides_of_where_it_begins():
    """With all tokens sampled from and with some; chunks are as long as contexts may be."""
    for limits in (USUAL, replace(USUAL, max_slots=200, max_context_tokens=100)):
        found = run(limits, rehearsal.around(limits, 128, 8))
        sizes = {(padded(len(arrays.positions)), arrays.keep is None) for arrays, _ in found}
        assert {(8, True), (8, False), (120, False), (128, False)} <= sizes
        assert ({(120, True), (128, True)} <= sizes) == (limits.max_slots >= 128)


def test_prompts_are_scored_where_compilers_see_it_and_where_memory_is_measured():
    """The chunk fills a step, and has the most alternatives for each token."""
    for series, tokens in ((rehearsal.every_kind, 3 * USUAL.page_size + 1), (rehearsal.largest, 256)):
        chunks = [
            int(count)
            for plans in series(USUAL)
            for plan in plans
            if plan.admissions
            for admission, count in zip(plan.admissions, plan.batch.token_counts, strict=True)
            if admission.sampling.prompt_logprobs == USUAL.max_top_logprobs
        ]
        assert max(chunks) == tokens
