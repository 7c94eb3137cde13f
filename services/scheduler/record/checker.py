"""Checks recorded plans: the contract, and the contents of every page.

``services.common.plan.rules`` checks each plan. In addition, the checker stores a hash of all tokens up to every
position of every page. A plan is wrong if a sequence would read other tokens from a page, because the page was reused
too early, shared wrongly, or copied too late.
"""

import numpy as np
import numpy.typing as npt

from services.common.plan.codec import decode_plan, decode_result
from services.common.plan.result_rules import check_result
from services.common.plan.rules import check_plan
from services.common.plan.slots import SlotState
from services.common.plan.types import Admission, LastPlan, Plan, WorkerLimits
from services.common.plan.verdict import has_repeats
from services.scheduler.record.hashes import next_hashes, prefix_hashes
from services.scheduler.record.logprobs import NOT_ASKED, ScoresDue, check_logprobs, check_scores
from services.scheduler.record.violation import Violation, expect, expect_each, violations_of
from tokasaurus.worker.v1 import plan_pb2

UNKNOWN_TOKEN = np.uint32(0xFFFFFFFF)  # placeholder for a token that was not recorded
_NONE = np.zeros(0, np.int64)


class PlanChecker:
    """A simulated worker. Call ``apply`` with each plan, then ``sampled`` or ``result_received``.

    After a violation, its state is undefined. Arrays are over slots, and entries of free slots are undefined. Used by
    one thread at a time.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        count, pages, size = limits.max_slots, limits.page_count, limits.page_size
        self.slots = SlotState(limits)
        self.last = LastPlan()
        self.hash = np.zeros(count, np.uint64)  # hash of the computed tokens
        self.last_token = np.zeros(count, np.uint32)  # last known token
        self.top_asked = np.full(count, NOT_ASKED)  # number of top log-probabilities; NOT_ASKED = no log-probabilities
        self.processed = np.zeros(count, bool)  # log-probabilities are of the processed distribution
        self._scored: dict[int, Admission] = {}  # by slot, admissions with prompt_logprobs
        self.scores_due: dict[int, ScoresDue] = {}  # by slot, for the last plan
        self.prompts: dict[int, np.ndarray] = {}  # by slot, tokens of the admission, uint32
        self._prompt_hashes: dict[int, np.ndarray] = {}
        self._last_prompt: tuple[np.ndarray, np.ndarray] = (_NONE, _NONE)  # tokens and hashes
        self.left_behind = np.zeros(count, np.int64)  # leading entries of the page table that are not read any more
        self.holders = np.zeros(pages, np.int64)  # number of page tables with the page, without those entries
        self.kv = np.zeros((pages, size), np.uint64)
        self.page_tokens = np.zeros((pages, size), np.uint32)  # last token of each hash
        self._sampling = _NONE  # slots for which the last plan samples a token
        self._complete = True  # the sampled tokens of the last plan are known
        # Pages that this plan gives to sequences to write on, as (slot or slots, pages).
        self._fresh: list[tuple[int | np.ndarray, np.ndarray]] = []
        self.pages_in_use = self.peak_pages = 0
        self.prefilled_tokens = 0  # tokens of admissions that were computed

    # -- one step

    def apply(self, message: plan_pb2.StepPlan) -> np.ndarray:
        """Apply a plan. Return the slots that sample a token, int64 in batch order. Raises ``Violation``."""
        if not self._complete:
            raise RuntimeError(f"step {self.last.step}: call `sampled` before the next plan")
        plan = decode_plan(message)
        with violations_of(plan.step):
            check_plan(plan, self.last, self.slots, self.limits)
            self._change(plan)
            self.last = self.last.followed_by(plan)
            self._sampling, self._complete = self._forward(self.last.batch.slots, self.last.batch.token_counts), False
        return self._sampling

    def sampled(self, tokens: np.ndarray) -> None:
        """Add the tokens of the slots that ``apply`` returned: uint32, ``UNKNOWN_TOKEN`` for a missing token."""
        slots, self._complete = self._sampling, True
        self.last_token[slots] = tokens
        self.slots.known[slots] += 1

    def result_received(self, message: plan_pb2.StepResult | None) -> int:
        """Check and apply the result of the plan, or None if it was not recorded. Return the number of tokens.

        Raises ``Violation``.
        """
        tokens = np.full(len(self._sampling), UNKNOWN_TOKEN, np.uint32)
        if message is None:
            self.sampled(tokens)
            return 0
        result = decode_result(message)
        good = np.isin(self._sampling, [failure.slot for failure in result.failures], invert=True)
        with violations_of(self.last.step):
            expect(result.step == self.last.step, f"it is the result of step {result.step}")
            check_result(result, self._sampling, self.limits)
            expect(np.array_equal(self._sampling[good], result.slots), "tokens in another order than the batch")
            asked = self.top_asked[self._sampling]
            check_logprobs(result, asked[good], asked[~good], self.processed[result.slots])
            check_scores(result.scored, self.scores_due)
        tokens[good] = result.tokens
        self.sampled(tokens)
        return len(result.tokens)

    # -- releases, admissions, pages

    def _change(self, plan: Plan) -> None:
        self._fresh.clear()
        if self.limits.window_tokens:
            self._leave_behind()
        self._release(plan.releases)
        for admission in plan.admissions:
            self._admit(admission)
        if len(plan.append_slots):
            self.slots.append_pages(plan.append_slots, plan.append_pages)
            self._fresh.append((plan.append_slots, plan.append_pages))
            self._hold(plan.append_pages)
        if self._fresh:
            self._check_fresh()
        if len(plan.copy_sources):
            self._copy(plan.copy_sources, plan.copy_targets)
        for admission in plan.admissions:
            self._check_cached(admission.slot, admission.cached_tokens)
        self.peak_pages = max(self.peak_pages, self.pages_in_use)

    def _release(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self._drop(self.slots.pages(slot)[self.left_behind[slot] :])
            del self.prompts[slot], self._prompt_hashes[slot]
            self._scored.pop(slot, None)
        self.slots.release(slots)

    def _admit(self, admission: Admission) -> None:
        slot, cached, settings = admission.slot, admission.cached_tokens, admission.sampling
        tokens, pages = admission.token_ids.astype(np.uint32), admission.pages
        self.left_behind[slot] = first = int(self.limits.pages_left_behind(np.array(cached)))
        if has_repeats(pages[first:]):
            raise Violation("the page table has a page twice", slot=slot)
        self.slots.admit(admission)
        if not np.array_equal(tokens, self._last_prompt[0]):  # samples of a request are admitted together
            self._last_prompt = tokens, prefix_hashes(tokens)
        self.prompts[slot], self._prompt_hashes[slot] = tokens, hashes = self._last_prompt
        self.hash[slot] = hashes[cached - 1] if cached else 0
        self.last_token[slot] = tokens[-1]
        self.processed[slot] = settings.processed_logprobs
        self.top_asked[slot] = settings.top_logprobs if settings.wants_logprobs else NOT_ASKED
        if settings.prompt_logprobs is not None:
            self._scored[slot] = admission
        self._hold(pages[first:])
        self._fresh.append((slot, pages[cached // self.limits.page_size :]))

    def _leave_behind(self) -> None:
        """Give up the pages that no later token of a sequence reads."""
        used = np.flatnonzero(self.slots.used)
        ends = np.minimum(self.limits.pages_left_behind(self.slots.computed[used]), self.slots.page_counts[used])
        more = ends > self.left_behind[used]
        for slot, end in zip(used[more].tolist(), ends[more].tolist(), strict=True):
            self._drop(self.slots.pages(slot)[self.left_behind[slot] : end])
            self.left_behind[slot] = end

    def _drop(self, pages: np.ndarray) -> None:
        self.holders[pages] -= 1
        self.pages_in_use -= int(np.count_nonzero(self.holders[pages] == 0))

    def _hold(self, pages: np.ndarray) -> None:
        self.pages_in_use += int(np.count_nonzero(self.holders[pages] == 0))
        np.add.at(self.holders, pages, 1)

    def _check_fresh(self) -> None:
        """Check that the pages which the plan gives to write on are in one page table only."""
        pages = np.concatenate([pages for _, pages in self._fresh])
        alone = self.holders[pages] == 1
        if not alone.all():
            slots = np.concatenate([np.broadcast_to(slots, pages.shape) for slots, pages in self._fresh])
            expect_each(alone, "given out to write on, but another sequence holds it", slots=slots, pages=pages)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        fresh = np.concatenate([pages for _, pages in self._fresh]) if self._fresh else _NONE
        expect_each(np.isin(targets, fresh), "the target of a copy, but not given out by this plan", pages=targets)
        self.kv[targets] = self.kv[sources]
        self.page_tokens[targets] = self.page_tokens[sources]

    def _check_cached(self, slot: int, cached: int) -> None:
        size, first = self.limits.page_size, int(self.left_behind[slot])
        pages = self.slots.page_table[slot, : -(-cached // size)]
        same = self.kv[pages].reshape(-1)[:cached] == self._prompt_hashes[slot][:cached]
        same[: first * size] = True  # not read
        if not same.all():
            at = int(same.argmin())
            raise Violation(f"it does not hold the token at {at}", slot=slot, page=int(pages[at // size]))

    # -- the forward pass

    def _forward(self, slots: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        start = self.slots.computed[slots]
        ends = start + counts
        self.scores_due = self._due(slots, start, ends) if self._scored else {}
        single = start >= self.slots.given[slots] - 1
        self._compute_last(slots[single])
        for slot, count in zip(slots[~single].tolist(), counts[~single].tolist(), strict=True):
            self._prefill(slot, count)
        sampling: npt.NDArray[np.int64] = slots[ends == self.slots.known[slots]]
        return sampling

    def _due(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> dict[int, ScoresDue]:
        due = {}
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if slot in self._scored:
                admission = self._scored[slot]
                settings = admission.sampling
                begin = max(start + 1, settings.prompt_logprobs_start)
                stop = min(end + 1, admission.prompt_length)
                if begin < stop:
                    due[slot] = ScoresDue(begin, stop, settings.prompt_logprobs or 0)
        return due

    def _compute_last(self, slots: np.ndarray) -> None:
        """Compute the last known token of each slot, which was sampled or is the last token of the admission."""
        size, position, tokens = self.limits.page_size, self.slots.computed[slots], self.last_token[slots]
        pages = self.slots.page_table[slots, position // size]
        expect_each(self.holders[pages] == 1, "written to, but other sequences hold it", slots=slots, pages=pages)
        self.hash[slots] = next_hashes(self.hash[slots], tokens)
        self.kv[pages, position % size] = self.hash[slots]
        self.page_tokens[pages, position % size] = tokens
        self.slots.computed[slots] = position + 1
        self.prefilled_tokens += int(np.count_nonzero(position < self.slots.given[slots]))

    def _prefill(self, slot: int, count: int) -> None:
        """Compute ``count`` tokens of the admission."""
        size, start = self.limits.page_size, int(self.slots.computed[slot])
        positions = np.arange(start, start + count)
        pages = self.slots.page_table[slot, positions // size]
        slots = np.broadcast_to(slot, pages.shape)
        expect_each(self.holders[pages] == 1, "written to, but other sequences hold it", slots=slots, pages=pages)
        self.kv[pages, positions % size] = self._prompt_hashes[slot][positions]
        self.page_tokens[pages, positions % size] = self.prompts[slot][positions]
        self.hash[slot] = self._prompt_hashes[slot][start + count - 1]
        self.slots.computed[slot] += count
        self.prefilled_tokens += count
