"""Every breach of the contract is named, and leaves the worker as it was."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from services.common.errors import FailedPrecondition, InvalidRequest
from services.common.plan.group_rules import check_groups
from services.common.plan.types import Admission, Batch, Groups, LastPlan, WorkerLimits
from services.worker.step.slots import SlotTable
from tests.worker.driver import admission, batch, budget

INF, NAN = float("inf"), float("nan")


@pytest.fixture
def driver(runner_for):
    """Limits: 8 pages of 16 tokens, 4 slots, 64 tokens a step, 100 of context. Slot 0 decodes; slot 1 has 20 of 40."""
    driver = runner_for(
        kv_cache_num_tokens=8 * 16, max_seqs_per_forward=4, max_tokens_per_forward=64, max_context_tokens=100
    )
    both = admission(0, range(10), [0]), admission(1, range(40), [1, 2, 3])
    driver.run(admissions=both, batch=batch([0, 1], [10, 20]))
    return driver


def new(slot=2, token_ids=range(5), pages=(4,), **arguments):
    return {"admissions": (admission(slot, token_ids, pages, **arguments),)}


WRONG_WHATEVER_THE_STATE = {
    "release out of range": ({"releases": [4]}, "release_slots: slot 4 is out of range, max_slots=4"),
    "release twice": ({"releases": [0, 0]}, "release_slots names a slot twice"),
    "admission slot": (new(slot=4), "slot 4 of max_slots=4"),
    "no tokens": (new(token_ids=[]), "0 tokens, expected 1 to max_context_tokens=100"),
    "too many tokens": (new(token_ids=range(101)), "101 tokens, expected 1 to max_context_tokens=100"),
    "token id": (new(token_ids=[1, 400]), "token 400 is out of range, vocab_size=400"),
    "all cached": (new(cached_tokens=5), "cached_tokens=5 must be less than the 5 tokens known"),
    "cached without pages": (new(token_ids=range(40), cached_tokens=17), "cached_tokens=17 do not fit into 1 pages"),
    "page id": (new(pages=[8]), "page 8 is out of range, page_count=8"),
    "too many pages": (new(pages=[4] * 8), "8 pages, at most 7 hold max_context_tokens=100"),
    "temperature": (new(temperature=-0.5), "temperature is -0.5: expected 0 to 100"),
    "infinite temperature": (new(temperature=INF), "temperature is inf: expected 0 to 100"),
    "top_p": (new(top_p=0.0), "top_p is 0: expected more than 0 and at most 1"),
    "top_p not a number": (new(top_p=NAN), "top_p is nan: expected more than 0"),
    "min_p": (new(min_p=1.5), "min_p is 1.5: expected 0 to 1"),
    "prompt_tokens": (
        {"admissions": (dataclasses.replace(new()["admissions"][0], prompt_tokens=6),)},
        "prompt_tokens=6: expected at most the 5 tokens known",
    ),
    "repetition_penalty": (new(repetition_penalty=-1.0), "repetition_penalty is -1: expected 0.01 to 100"),
    "frequency_penalty": (new(frequency_penalty=NAN), "frequency_penalty is nan: expected -2 to 2"),
    "presence_penalty": (new(presence_penalty=2.5), "presence_penalty is 2.5: expected -2 to 2"),
    "thinking end": (
        new(thinking=budget(1, 400)),
        "thinking.end_token_id: token 400 is out of range, vocab_size=400",
    ),
    "thinking begin": (
        new(thinking=budget(1, 3, 400)),
        "thinking.begin_token_id: token 400 is out of range, vocab_size=400",
    ),
    "prompt_logprobs_start": (
        new(prompt_logprobs=0, prompt_logprobs_start=5),
        "prompt_logprobs_start=5: expected less than the 5 tokens of the prompt",
    ),
    "top_logprobs": (new(top_logprobs=21), "top_logprobs=21: expected at most 20"),
    "bias token": (
        new(logit_bias_token_ids=np.array([400]), logit_bias_values=np.ones(1, np.float32)),
        "logit_bias_token_ids: token 400 is out of range",
    ),
    "bias lengths": (
        new(logit_bias_token_ids=np.array([4, 5]), logit_bias_values=np.ones(1, np.float32)),
        "2 logit_bias_token_ids",
    ),
    "bias value": (
        new(logit_bias_token_ids=np.array([4]), logit_bias_values=np.array([NAN], np.float32)),
        "not finite",
    ),
    "append lengths": ({"append_slots": [0], "append_pages": [1, 2]}, "1 append_slots and 2 append_pages"),
    "append to no slot": ({"append_pages": [1]}, "0 append_slots and 1 append_pages"),
    "append page": ({"append_slots": [0], "append_pages": [9]}, "page 9 is out of range"),
    "append too much": ({"append_slots": [0] * 7, "append_pages": [4] * 7}, "slot 0 would have 8 pages: at most 7"),
    "copy lengths": ({"copy_sources": [0], "copy_targets": []}, "1 copy_source_pages and 0 copy_target_pages"),
    "copy source": ({"copy_sources": [8], "copy_targets": [0]}, "copy_source_pages: page 8 is out of range"),
    "copy target": ({"copy_sources": [0], "copy_targets": [8]}, "copy_target_pages: page 8 is out of range"),
    "copy twice": ({"copy_sources": [0, 1], "copy_targets": [4, 4]}, "copy_target_pages names a page twice"),
    "batch slot": ({"batch": batch([4])}, "batch.slots: slot 4 is out of range"),
    "copy from and onto": ({"copy_sources": [0, 1], "copy_targets": [1, 2]}, "page 1 is copied from and onto"),
    "batch twice": ({"batch": batch([0, 0])}, "batch.slots names a slot twice"),
    "batch lengths": ({"batch": batch([0, 1], [1])}, "2 slots and 1 token_counts"),
    "nothing to compute": ({"batch": batch([0], [0])}, "token_counts holds a 0"),
    "more than is known": ({"batch": batch([1], [21])}, "slot 1: 21 tokens to compute, but only 20 of its 40 known"),
    "decode ahead": ({"batch": batch([0], [2])}, "slot 0: 2 tokens to compute, but only 1 of its 11 known"),
    "too large a step": (
        {**new(token_ids=range(60), pages=[4, 5, 6, 7]), "batch": batch([2, 1], [60, 5])},
        "a batch of 65 tokens: at most max_tokens_per_step=64",
    ),
    "short page table": (
        {**new(token_ids=range(20)), "batch": batch([2], [17])},
        "slot 2: its page table of 1 pages of 16 tokens is too short for 17 tokens",
    ),
    "hydragen": ({"groups": Groups(*(np.array([1]) for _ in range(3)))}, "WorkerInfo.hydragen is false"),
    "micro-batches": (
        {"micro_batch_rows": (1, 0)},
        "2 micro_batch_rows, but this worker's WorkerInfo.max_micro_batches",
    ),
    "micro-batch of other rows": ({"micro_batch_rows": (2,)}, "micro_batch_rows of 2 rows beside a batch of 1 rows"),
    "micro-batch without a batch": ({"batch": None, "micro_batch_rows": (2,)}, "micro_batch_rows of 2 rows beside no"),
}
ANOTHER_STATE = {
    "step skipped": ({"step": 3}, "step 3 follows step 1: expected 2"),
    "step repeated": ({"step": 1}, "step 1 follows step 1: expected 2"),
    "release of a free slot": ({"releases": [2]}, "release_slots: slot 2 is not in use"),
    "slot in use": (new(slot=0), "slot 0 is in use; release it first"),
    "slot admitted twice": ({"admissions": new()["admissions"] * 2}, "slot 2 is in use"),
    "append to a free slot": ({"append_slots": [3], "append_pages": [4]}, "append_slots: slot 3 is not in use"),
    "batch with a free slot": ({"batch": batch([3])}, "batch.slots: slot 3 is not in use"),
    "batch with a released slot": ({"releases": [1], "batch": batch([0, 1])}, "slot 1 is not in use"),
    "previous batch with a released slot": ({"releases": [1], "batch": None}, "batch.slots: slot 1 is not in use"),
}
CASES = [(InvalidRequest, *case) for case in WRONG_WHATEVER_THE_STATE.values()]
CASES += [(FailedPrecondition, *case) for case in ANOTHER_STATE.values()]


@pytest.mark.parametrize(("kind", "parts", "message"), CASES, ids=[*WRONG_WHATEVER_THE_STATE, *ANOTHER_STATE])
def test_a_breach_is_named_and_changes_nothing(kind, parts, message, driver):
    with pytest.raises(kind) as caught:
        driver.run(**{"batch": batch([0])} | parts)
    assert message in caught.value.message
    output = driver.run(admissions=(admission(2, range(5), [4]),), batch=batch([0, 1, 2], [1, 20, 5]))
    assert output.sampled.slots.tolist() == [0, 1, 2]


def test_a_grammar_is_refused_where_there_are_none(driver, monkeypatch):
    monkeypatch.setattr(driver.runner, "limits", dataclasses.replace(driver.runner.limits, grammars=False))
    with pytest.raises(InvalidRequest, match=r"WorkerInfo.grammars is false: leave it empty") as caught:
        driver.run(**new(grammar="start: /a/"), batch=batch([0]))
    assert caught.value.field == "plan.admissions[0].sampling.grammar"


def test_a_sequence_ends_at_the_context_limit(driver):
    driver.run(admissions=(admission(2, range(100), range(1, 8), cached_tokens=90),), batch=batch([2], [10]))
    with pytest.raises(InvalidRequest, match="slot 2 would pass max_context_tokens=100; release it"):
        driver.run(batch=batch([2]))


def test_the_batch_is_checked_again_when_it_is_left_out(driver):
    driver.run(batch=batch([1], [20]))
    with pytest.raises(InvalidRequest, match="slot 1: 20 tokens to compute, but only 1"):
        driver.run()


def test_a_slot_is_released_and_admitted_in_one_plan(driver):
    output = driver.run(releases=[0, 1], **new(slot=0), batch=batch([0], [5]))
    assert output.sampled.slots.tolist() == [0]


GROUP_LIMITS = WorkerLimits(
    page_size=4,
    page_count=64,
    max_slots=12,
    max_tokens_per_step=64,
    max_context_tokens=24,
    vocab_size=400,
    max_top_logprobs=20,
    hydragen=True,
)


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A batch of families, of which some were admitted in this very plan, and groups that are as they should be."""

    slots: SlotTable
    batch: Batch
    admissions: tuple[Admission, ...]
    computed: np.ndarray  # [max_slots] int64
    groups: list[tuple[int, int, int]]  # start, count, prefix pages

    def check(self, groups: list[tuple[int, int, int]] | Groups) -> None:
        if not isinstance(groups, Groups):
            groups = Groups(*np.array(groups, np.int64).reshape(-1, 3).T)
        now = LastPlan(1, self.batch, groups)
        check_groups(now, self.admissions, self.computed, self.slots, GROUP_LIMITS.page_size)


@st.composite
def grouped_batches(draw) -> Grouped:
    """At least one group; families share their first pages and then have pages of their own, next to each other."""
    size, width = GROUP_LIMITS.page_size, GROUP_LIMITS.max_pages_per_slot
    families = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, width)), min_size=1, max_size=3))
    order = draw(st.permutations(range(GROUP_LIMITS.max_slots)))
    slots, computed = SlotTable(GROUP_LIMITS, torch.device("cpu")), np.zeros(GROUP_LIMITS.max_slots, np.int64)
    rows, admissions, groups, fresh = [], [], [], 0
    for count, shared in families:
        prefix, fresh = list(range(fresh, fresh + shared)), fresh + shared
        groups.append((len(rows), count, draw(st.integers(1, shared))))
        for _ in range(count):
            slot = order[len(rows)]
            own = draw(st.integers(0, min(2, width - shared)))
            length = draw(st.integers(shared * size, (shared + own) * size))
            made = admission(slot, np.zeros(length + 1), [*prefix, *range(fresh, fresh + own)], cached_tokens=length)
            fresh += own
            rows.append(slot)
            computed[slot] = length
            if draw(st.booleans()):
                admissions.append(made)
            else:
                slots.admit(made)
    kept = draw(st.permutations([group for group in groups if draw(st.booleans())] or groups[:1]))
    return Grouped(slots, batch(rows), tuple(admissions), computed, list(kept))


@given(grouped_batches())
def test_groups_of_rows_that_share_computed_pages_pass(made):
    made.check(made.groups)


@given(grouped_batches())
def test_no_groups_pass(made):
    made.check([])


@given(grouped_batches(), st.integers(0, 2))
def test_groups_that_are_not_parallel_are_named(made, shorter):
    columns = list(np.array(made.groups).T)
    columns[shorter] = columns[shorter][:-1]
    with pytest.raises(InvalidRequest, match=r"\d starts, \d counts and \d prefix_pages: they are parallel"):
        made.check(Groups(*columns))


@given(grouped_batches(), st.sampled_from((1, 2)), st.data())
def test_a_group_of_nothing_is_named(made, column, data):
    groups = [list(group) for group in made.groups]
    groups[data.draw(st.integers(0, len(groups) - 1))][column] = 0
    with pytest.raises(InvalidRequest, match="counts and prefix_pages must be 1 or more"):
        made.check(groups)


@given(grouped_batches(), st.integers(1, 5))
def test_a_group_behind_the_batch_is_named(made, beyond):
    rows = len(made.batch.slots)
    start, _, pages = max(made.groups)
    groups = [*sorted(made.groups)[:-1], (start, rows - start + beyond, pages)]
    with pytest.raises(InvalidRequest, match=f"a group ends at row {rows + beyond} of a batch of {rows} rows"):
        made.check(groups)


@given(grouped_batches(), st.data())
def test_groups_that_overlap_are_named(made, data):
    start, count, pages = data.draw(st.sampled_from(made.groups))
    within = data.draw(st.integers(start, start + count - 1))
    groups = data.draw(st.permutations([*made.groups, (within, 1, pages)]))
    with pytest.raises(InvalidRequest, match="two groups overlap"):
        made.check(groups)


@given(grouped_batches(), st.data())
def test_a_prefix_that_is_not_computed_is_named(made, data):
    start, count, pages = data.draw(st.sampled_from(made.groups))
    slot = int(made.batch.slots[data.draw(st.integers(start, start + count - 1))])
    made.computed[slot] = data.draw(st.integers(0, pages * GROUP_LIMITS.page_size - 1))
    with pytest.raises(InvalidRequest, match=f"slot {slot}: {made.computed[slot]} tokens are computed, but its group"):
        made.check(made.groups)


@given(grouped_batches(), st.data())
def test_a_row_with_another_page_in_its_prefix_is_named(made, data):
    shared = [group for group in made.groups if group[1] > 1]
    assume(shared)
    start, count, pages = data.draw(st.sampled_from(shared))
    slot = int(made.batch.slots[data.draw(st.integers(start, start + count - 1))])
    place = data.draw(st.integers(0, pages - 1))
    new = {each.slot: each.pages for each in made.admissions}
    table = new.get(slot, made.slots.page_table[slot])
    table[place] = GROUP_LIMITS.page_count - 1
    with pytest.raises(InvalidRequest, match=f"the rows of the group at row {start} differ in their first {pages} pa"):
        made.check(made.groups)
