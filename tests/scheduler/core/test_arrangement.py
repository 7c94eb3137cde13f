"""The order of a step's rows: groups together, parts of equal work, every row once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.step.arrangement import Arrangement, arrange


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def put(decoding, groups, pages, prefill=(), counts=(), *, min_rows=1, parts=1) -> Arrangement:
    arrays = (ints(*decoding), np.array(groups, np.int32), ints(*pages), ints(*prefill), ints(*counts))
    return arrange(*arrays, min_rows=min_rows, micro_batches=parts)


def groups_of(batch: Arrangement) -> list[tuple[list[int], int]]:
    """Slots and pages of each group."""
    triples = zip(batch.group_starts.tolist(), batch.group_counts.tolist(), batch.group_pages.tolist(), strict=True)
    return [(batch.slots[start : start + count].tolist(), pages) for start, count, pages in triples]


def bounds(batch: Arrangement) -> list[tuple[int, int]]:
    """First row of each part and of the next."""
    ends = np.cumsum(batch.micro_batch_rows if len(batch.micro_batch_rows) else [len(batch.slots)]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


@st.composite
def steps(draw) -> dict:
    pages = draw(st.lists(st.integers(1, 99), max_size=5))
    slots = draw(st.permutations(range(60)))
    decoding = slots[: draw(st.integers(0, 45))]
    decoding = sorted(decoding) if draw(st.booleans()) else decoding
    groups = [draw(st.integers(-1, len(pages) - 1)) for _ in decoding]
    counts = draw(st.lists(st.one_of(st.just(1), st.integers(1, 50)), max_size=10))
    return {"decoding": decoding, "groups": groups, "pages": pages, "prefill": slots[45 : 45 + len(counts)],
            "counts": counts, "min_rows": draw(st.integers(1, 6)), "parts": draw(st.integers(1, 6))}  # fmt: skip


@given(steps())
def test_every_row_comes_once_with_its_tokens(step):
    batch = put(**step)
    given_rows = [(slot, 1) for slot in step["decoding"]] + list(zip(step["prefill"], step["counts"], strict=True))
    assert sorted(zip(batch.slots.tolist(), batch.counts.tolist(), strict=True)) == sorted(given_rows)
    assert {array.dtype for array in batch} == {np.dtype(np.int64)}
    if step["parts"] == 1:
        assert len(batch.micro_batch_rows) == 0
    else:
        assert len(batch.micro_batch_rows) == step["parts"]
        assert batch.micro_batch_rows.sum() == len(batch.slots)


@given(steps())
def test_a_micro_batch_has_groups_then_other_decoding_rows_then_prefills(step):
    batch = put(**step)
    group_of = dict(zip(step["decoding"], step["groups"], strict=True))
    sharing = dict.fromkeys(range(len(batch.slots)), -1)
    for start, count in zip(batch.group_starts.tolist(), batch.group_counts.tolist(), strict=True):
        assert count >= step["min_rows"]
        for row in range(start, start + count):
            assert sharing[row] == -1  # no row in two groups
            sharing[row] = start
    for first, end in bounds(batch):
        part = batch.slots[first:end].tolist()
        kinds = [0 if sharing[row] >= 0 else 1 if batch.slots[row] in group_of else 2 for row in range(first, end)]
        assert kinds == sorted(kinds)
        for slots, pages in groups_of(batch):
            if set(slots) & set(part):
                assert set(slots) <= set(part)  # inside one part
                (group,) = {group_of[slot] for slot in slots}
                assert pages == step["pages"][group]
                assert slots == sorted(slot for slot in part if group_of.get(slot) == group)  # all of the part's
        # What is in no group here was in none, or too few.
        alone = [group_of[part[at]] for at, kind in enumerate(kinds) if kind == 1]
        assert all(alone.count(group) < step["min_rows"] for group in alone if group >= 0)
        prefilled = [slot for slot in part if slot not in group_of]
        assert prefilled == [slot for slot in step["prefill"] if slot in prefilled]  # in the order given


@given(steps())
def test_micro_batches_differ_by_at_most_the_tokens_of_the_longest_row(step):
    batch = put(**step)
    tokens = [int(batch.counts[first:end].sum()) for first, end in bounds(batch)]
    assert max(tokens) - min(tokens) <= max(batch.counts.tolist(), default=0)


@given(steps())
def test_the_same_rows_give_the_same_batch(step):
    assert all(np.array_equal(one, other) for one, other in zip(put(**step), put(**step), strict=True))


@given(steps())
def test_groups_are_in_order_across_micro_batches(step):
    """A boundary cuts one group at most, so no more pieces than groups and boundaries."""
    batch = put(**{**step, "min_rows": 1})
    used = len({group for group in step["groups"] if group >= 0})
    assert used <= len(batch.group_starts) <= used + step["parts"] - 1


def test_without_groups_the_rows_stay_as_they_are():
    batch = put([9, 2, 5], [-1, -1, -1], [], [7, 1], [30, 1])
    assert batch.slots.tolist() == [9, 2, 5, 7, 1]
    assert batch.counts.tolist() == [1, 1, 1, 30, 1]
    assert [len(array) for array in batch[2:]] == [0, 0, 0, 0]


def test_groups_come_first_each_by_slot():
    batch = put([1, 2, 3, 4, 5, 6], [1, 0, -1, 1, 0, 1], [8, 9], [7], [40])
    assert batch.slots.tolist() == [2, 5, 1, 4, 6, 3, 7]
    assert groups_of(batch) == [([2, 5], 8), ([1, 4, 6], 9)]
    assert len(batch.micro_batch_rows) == 0


def test_a_group_of_too_few_rows_is_none_and_its_rows_follow_the_groups():
    batch = put([1, 2, 3, 4, 5], [0, -1, 1, 1, 1], [8, 9], min_rows=3)
    assert batch.slots.tolist() == [3, 4, 5, 1, 2]
    assert groups_of(batch) == [([3, 4, 5], 9)]


def test_a_divided_group_becomes_a_group_in_each_micro_batch():
    batch = put(range(8), [0] * 8, [5], min_rows=4, parts=2)
    assert batch.micro_batch_rows.tolist() == [4, 4]
    assert groups_of(batch) == [([0, 1, 2, 3], 5), ([4, 5, 6, 7], 5)]


def test_a_piece_of_too_few_rows_is_no_group():
    batch = put(range(8), [0] * 3 + [1] * 5, [5, 6], min_rows=3, parts=2)
    assert batch.micro_batch_rows.tolist() == [4, 4]
    assert groups_of(batch) == [([0, 1, 2], 5), ([4, 5, 6, 7], 6)]
    assert batch.slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_long_prefill_is_weighed_against_decoding_rows():
    batch = put(range(20), [-1] * 20, [], [30, 31], [6, 10], parts=2)
    assert batch.micro_batch_rows.tolist() == [9, 13]  # 8 rows and 10 tokens, 12 rows and 6 tokens
    assert batch.counts[:9].sum() == batch.counts[9:].sum() == 18
    assert batch.slots[8] == 31
    assert batch.slots[-1] == 30


@pytest.mark.parametrize("rows", [0, 1, 2])
def test_micro_batches_without_rows_are_empty(rows):
    batch = put(range(rows), [-1] * rows, [], parts=3)
    assert batch.micro_batch_rows.tolist() == [1] * rows + [0] * (3 - rows)
