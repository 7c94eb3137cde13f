"""A captured step's inputs in one block, against the arrays of a step that is launched kernel by kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.plan.types import NO_GROUPS, Batch, Groups, WorkerLimits
from services.worker.runner.cuda.block import Layout, append, fill_in, fill_in_groups
from services.worker.runner.cuda.inputs import Standing, build
from services.worker.runner.cuda.state import NO_CHANGES, PageChanges
from services.worker.sampling.rows import RowPreparer
from services.worker.step.slots import SlotTable
from tests.properties import examples
from tests.worker.driver import NONE, admission
from tests.worker.interpreter import needs_triton

pytestmark = needs_triton

PAGE, SLOTS, SIZE = 4, 8, 8
CPU = torch.device("cpu")
SETTINGS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-9, 0.7, 3e38]),
        "seed": st.integers(0, 2**64 - 1),
        "sample_index": st.integers(0, 2**32 - 1),
    },
    optional={
        "top_k": st.just(3),
        "top_p": st.just(0.5),
        "min_p": st.just(0.1),
        "logprobs": st.just(True),
        "presence_penalty": st.just(1.0),
        "logit_bias_token_ids": st.just(np.array([5])),
    },
)


@st.composite
def decodes(draw):
    """A table, and slots that have one token to compute before they sample: the prompt's last, or one of their own."""
    table, slots = SlotTable(WorkerLimits(PAGE, 64, SLOTS, 256, 64, 100, 5), CPU), draw(st.permutations(range(SLOTS)))
    slots = np.array(slots[: draw(st.integers(1, SLOTS))])
    for slot in slots.tolist():
        known = draw(st.integers(2, 20))
        table.admit(admission(slot, np.arange(known) + 10 * slot, np.arange(6), **draw(SETTINGS)))
        if draw(st.booleans()):
            table.known[slot] = known = known + draw(st.integers(1, 5))
        table.computed[slot] = known - 1
    table.derive(slots)
    return table, slots


def dirty(layout: Layout):
    """The fields of a block that another step has used."""
    fields = layout.fields(layout.empty(CPU).numpy())
    for field in fields:
        if field is not None:
            field[...] = 3
    return fields


@given(decodes())
@settings(max_examples=examples(200))
def test_a_block_holds_what_a_step_without_graph_uploads(step):
    table, slots = step
    count, fields = len(slots), dirty(Layout(SIZE, None))
    fill_in(fields, 24, slots, table.computed[slots], table)
    arrays = build(Batch(slots, np.ones_like(slots)), NO_GROUPS, table, PAGE)
    assert arrays.keep is None
    rows = RowPreparer(16, 16).prepare(table, arrays.sample_slots, arrays.sample_positions, torch.from_numpy, SIZE)
    assert fields.where.tolist() == [24]
    assert fields.slots.tolist() == arrays.token_slots.tolist() + [-1] * (SIZE - count)
    assert fields.positions[:count].tolist() == arrays.positions.tolist()
    assert fields.known[:count].tolist() == arrays.known.tolist()
    assert fields.scales.tolist() == rows.scales.tolist()
    assert fields.keys[:count].tolist() == rows.keys[:count].tolist()
    assert table.plain[slots].all() == rows.plain


def test_groups_lie_beside_their_rows():
    groups = Groups(np.array([1]), np.array([2]), np.array([3]))
    standing = Standing.of(Batch(np.array([4, 2, 6]), np.ones(3, np.int64)), groups, PAGE)
    assert standing.singles
    assert standing.spans.slots.tolist() == [2]
    fields, tiles = dirty(Layout(SIZE, 2)), np.arange(5).reshape(1, 5)
    fill_in_groups(fields, standing.prefix_tokens, tiles)
    assert fields.prefix_tokens.tolist() == [0, 3 * PAGE, 3 * PAGE, 0, 0, 0, 0, 0]
    assert fields.tiles.tolist() == [[0, 1, 2, 3, 4], [0] * 5]


def test_a_batch_with_a_chunk_is_for_no_graph():
    assert not Standing.of(Batch(np.array([1, 2]), np.array([1, 3])), NO_GROUPS, PAGE).singles


@pytest.mark.parametrize(("count", "fits"), [(0, True), (3, True), (SIZE, True), (SIZE + 1, False)])
def test_as_many_pages_as_rows_are_appended_by_the_graph(count, fits):
    fields, slots = dirty(Layout(SIZE, None)), np.arange(count)
    changes = PageChanges(slots, slots + 10, slots + 20) if count else NO_CHANGES
    assert append(fields, changes) is fits
    made = fields.append_slots >= 0
    assert fields.append_slots[made].tolist() == (slots.tolist() if fits else [])
    if fits:
        assert fields.append_places[made].tolist() == (slots + 10).tolist()
        assert fields.append_pages[made].tolist() == (slots + 20).tolist()


@pytest.mark.parametrize("layout", [Layout(1, None), Layout(8, None), Layout(64, 12)], ids=str)
def test_fields_are_apart_and_aligned_and_padding_does_nothing(layout):
    block = layout.empty(CPU)
    fields = layout.fields(block)
    assert fields.slots.tolist() == fields.known.tolist() == [-1] * layout.size
    assert set(fields.append_slots.tolist()) == {-1}
    assert fields.keys.shape == (layout.size, 2)
    block.zero_()
    for number, field in enumerate(each for each in fields if each is not None):
        assert (field.data_ptr() - block.data_ptr()) % 16 == 0
        assert not field.any()
        field.fill_(number + 1)
    assert (fields.tiles is None) == (fields.prefix_tokens is None) == (layout.tiles is None)


def test_page_changes_are_joined_in_order():
    one, other = (PageChanges(*(np.array([value + part]) for part in range(3))) for value in (0, 10))
    joined = PageChanges.joined([one, other])
    assert [column.tolist() for column in (joined.slots, joined.places, joined.pages)] == [[0, 10], [1, 11], [2, 12]]
    assert PageChanges.joined([one]) is one
    assert len(PageChanges.joined([])) == len(NONE)
