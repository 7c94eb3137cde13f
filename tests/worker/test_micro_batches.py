"""Steps that are cut into micro-batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.plan.rules import check_plan
from services.common.plan.types import NO_GROUPS, NO_ROWS, Groups, LastPlan, WorkerLimits, micro_batches
from services.worker.step.slots import SlotTable
from tests.worker.driver import Driver, admission, batch

LIMITS = WorkerLimits(
    page_size=4,
    page_count=16,
    max_slots=6,
    max_tokens_per_step=64,
    max_context_tokens=24,
    vocab_size=400,
    max_top_logprobs=20,
    hydragen=True,
    max_micro_batches=3,
)


@given(st.lists(st.integers(0, 4), max_size=6), st.data())
def test_micro_batches_are_the_batch_in_order(rows, data):
    total = sum(rows) if rows else data.draw(st.integers(0, 5))
    whole = batch(np.arange(total) * 3, np.arange(total) + 1)
    parts = micro_batches(whole, tuple(rows))
    assert [len(part.slots) for part in parts] == [count for count in rows or [total] if count]
    for name in ("slots", "token_counts"):
        joined = np.concatenate([np.empty(0, np.int64), *(getattr(part, name) for part in parts)])
        assert joined.tolist() == getattr(whole, name).tolist()


def check(previous_batch=NO_ROWS, previous_groups=NO_GROUPS, previous_cut=(), **parts) -> None:
    """A plan of six sequences that share their first page and decode."""
    slots = SlotTable(LIMITS, torch.device("cpu"))
    for slot in range(6):
        slots.admit(admission(slot, range(6), [0, slot + 1], cached_tokens=5))
    plan = Driver(None).plan(**parts)
    check_plan(plan, LastPlan(0, previous_batch, previous_groups, previous_cut), slots, LIMITS)


def groups(*triples: tuple[int, int, int]) -> Groups:
    return Groups(*np.array(triples, np.int64).reshape(-1, 3).T)


@pytest.mark.parametrize("rows", [(), (6,), (2, 4), (0, 6, 0), (3, 0, 3)])
def test_any_cut_of_the_batch_is_taken(rows):
    check(batch=batch(range(6)), micro_batch_rows=rows)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"micro_batch_rows": (2, 2, 1, 1)}, r"4 micro_batch_rows, but .*max_micro_batches is 3: give at most 3"),
        ({"micro_batch_rows": (2, 3)}, "micro_batch_rows of 5 rows beside a batch of 6 rows"),
        ({"micro_batch_rows": (2, 4), "groups": groups((0, 2, 1), (3, 3, 1))}, None),
        ({"micro_batch_rows": (2, 4), "groups": groups((1, 2, 1))}, "the group at row 1 goes on behind row 2, where a"),
        ({"micro_batch_rows": (0, 4, 2), "groups": groups((0, 6, 1))}, "the group at row 0 goes on behind row 4"),
        ({"micro_batch_rows": (6,), "groups": groups((0, 6, 1))}, None),
    ],
)
def test_what_a_cut_and_its_groups_must_be(parts, message):
    if message is None:
        check(batch=batch(range(6)), **parts)
        return
    with pytest.raises(InvalidRequest, match=message):
        check(batch=batch(range(6)), **parts)


def test_new_groups_must_fit_the_cut_that_stays():
    before = {"previous_batch": batch(range(6)), "previous_cut": (2, 4)}
    check(**before, groups=groups((2, 4, 1)))
    with pytest.raises(InvalidRequest, match="goes on behind row 2"):
        check(**before, groups=groups((0, 3, 1)))


def test_groups_that_stay_must_fit_a_new_cut():
    before = {"previous_batch": batch(range(6)), "previous_groups": groups((0, 3, 1))}
    check(**before, batch=batch(range(6)))
    with pytest.raises(InvalidRequest, match="goes on behind row 2"):
        check(**before, batch=batch(range(6)), micro_batch_rows=(2, 4))
