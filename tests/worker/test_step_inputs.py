"""The arrays of a step on a GPU, against a walk over its rows."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.plan.types import NO_GROUPS, Batch, Groups, WorkerLimits
from services.worker.runner.cuda.inputs import build, fill_up, padded, split
from services.worker.step.slots import SlotTable
from tests.properties import examples
from tests.worker.driver import admission

PAGE = 4
SLOTS = 8


@st.composite
def steps(draw):
    """A table of slots in any state, a batch over some of them, and groups of neighbouring rows in any order."""
    table = SlotTable(WorkerLimits(PAGE, 64, SLOTS, 256, 64, 100, 5), torch.device("cpu"))
    rows = draw(st.permutations(range(SLOTS)))[: draw(st.integers(1, SLOTS))]
    counts = []
    for slot in rows:
        given, computed = draw(st.integers(2, 20)), 0
        table.admit(admission(slot, np.arange(given) + 10 * slot, np.arange(6)))
        if draw(st.booleans()):  # past its prompt
            table.known[slot] = given + draw(st.integers(1, 5))
            computed = table.known[slot] - 1
        else:
            computed = draw(st.integers(0, given - 1))
        table.computed[slot] = computed
        counts.append(draw(st.integers(1, int(table.known[slot] - computed))))
    starts, sizes, at = [], [], 0
    while at < len(rows):
        size = draw(st.integers(1, 3))
        if draw(st.booleans()) and at + size <= len(rows):
            starts.append(at)
            sizes.append(size)
        at += size
    order = draw(st.permutations(range(len(starts))))
    columns = np.array([starts, sizes, [1] * len(starts)], int)[:, order]
    groups = Groups(*columns) if starts else NO_GROUPS
    return table, Batch(np.array(rows), np.array(counts)), groups


@given(steps())
@settings(max_examples=examples(200))
def test_a_step_is_what_a_walk_over_its_rows_gives(step):
    table, batch, groups = step
    arrays = build(batch, groups, table, PAGE)
    rows = list(zip(batch.slots.tolist(), batch.token_counts.tolist(), strict=True))
    order = sorted(range(len(rows)), key=lambda row: rows[row][1] != 1)
    slots, positions, known, sampled = [], [], [], []
    for row in order:
        slot, count = rows[row]
        begin = int(table.computed[slot])
        for position in range(begin, begin + count):
            slots.append(slot)
            positions.append(position)
            known.append(10 * slot + position if position < table.given[slot] else -1)
        if begin + count == table.known[slot]:
            sampled.append((row, slot, begin + count, len(slots) - 1))
    assert arrays.token_slots.tolist() == slots
    assert arrays.positions.tolist() == positions
    assert arrays.known.tolist() == known
    assert arrays.decodes == sum(count == 1 for _, count in rows)
    assert arrays.sample_slots.tolist() == [slot for _, slot, _, _ in sampled]
    assert arrays.sample_positions.tolist() == [position for _, _, position, _ in sampled]
    keep = list(range(len(slots))) if arrays.keep is None else arrays.keep.tolist()
    assert keep == [token for _, _, _, token in sampled]
    in_batch_order = range(len(sampled)) if arrays.batch_order is None else arrays.batch_order
    assert [sampled[index][0] for index in in_batch_order] == sorted(row for row, _, _, _ in sampled)


@given(steps())
@settings(max_examples=examples(200))
def test_groups_keep_their_rows(step):
    table, batch, groups = step
    arrays = build(batch, groups, table, PAGE)
    expected = {}
    for start, count, pages in zip(groups.starts, groups.counts, groups.prefix_pages, strict=True):
        if (batch.token_counts[start : start + count] == 1).all():
            for slot in batch.slots[start : start + count].tolist():
                expected[slot] = pages * PAGE
    found = {}
    if arrays.groups is not None:
        spans = arrays.groups
        assert (np.diff(spans.starts) > 0).all()
        for start, count, slot, context in zip(spans.starts, spans.counts, spans.slots, spans.contexts, strict=True):
            members = arrays.token_slots[start : start + count].tolist()
            assert slot == members[0]
            found |= dict.fromkeys(members, int(context))
        prefix = dict(zip(arrays.token_slots[: arrays.decodes].tolist(), arrays.prefix_tokens.tolist(), strict=True))
        assert {slot: tokens for slot, tokens in prefix.items() if tokens} == expected
    assert found == expected


@given(steps(), st.data())
@settings(max_examples=examples(100))
def test_the_parts_of_a_cut_step_have_its_rows_and_their_groups(step, data):
    _, batch, groups = step
    inner = {
        row
        for start, count in zip(groups.starts, groups.counts, strict=True)
        for row in range(start + 1, start + count)
    }
    cuts = [row for row in range(1, len(batch.slots)) if row not in inner and data.draw(st.booleans())]
    sizes = tuple(np.diff([0, *cuts, len(batch.slots)]).tolist())
    rows, prefixes = [], {}
    for part in split(batch, groups, sizes, PAGE):
        rows += zip(part.batch.slots.tolist(), part.batch.token_counts.tolist(), strict=True)
        assert part.singles == (part.batch.token_counts == 1).all()
        assert (part.spans is None) == (not part.singles or not len(part.groups))
        for start, count, pages in zip(part.groups.starts, part.groups.counts, part.groups.prefix_pages, strict=True):
            prefixes[tuple(part.batch.slots[start : start + count].tolist())] = pages
    assert rows == list(zip(batch.slots.tolist(), batch.token_counts.tolist(), strict=True))
    assert prefixes == {
        tuple(batch.slots[start : start + count].tolist()): pages
        for start, count, pages in zip(groups.starts, groups.counts, groups.prefix_pages, strict=True)
    }


def test_sizes_are_multiples_of_eight_and_of_the_ranks_that_share_them():
    assert [padded(size) for size in (0, 1, 8, 9, 16)] == [8, 8, 8, 16, 16]
    assert [padded(size, 24) for size in (0, 24, 25)] == [24, 24, 48]
    assert fill_up(np.array([1, 2], np.int32), 4, -1).tolist() == [1, 2, -1, -1]
