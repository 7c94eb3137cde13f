"""Does a plan keep the worker's contract? Strict book-keeping of what the worker's slots and pages hold.

The KV cache is played by a table that holds, for every position of every page, a hash of all tokens up to there. A
plan that lets a sequence read a page with anything else in it (reused too early, shared wrongly, copied too late) is
a violation, as is every plan that breaks the contract.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from services.common.packed import read_fixed32
from services.scheduler.record.hashes import next_hashes, prefix_hashes
from services.scheduler.record.layout import NONE, Groups, check_groups, check_micro_batches
from services.scheduler.record.limits import WorkerLimits, check_admission, most_pages
from services.scheduler.record.logprobs import NOT_ASKED, ScoresDue, check_logprobs, check_scores
from services.scheduler.record.violation import PlanViolation, ResultViolation, Violation, expect, require, require_each
from tokasaurus.worker.v1 import plan_pb2

UNKNOWN_TOKEN = np.uint32(0xFFFFFFFF)  # stands for a token that nobody told


class PlanChecker:
    """Plays one worker from its connection on: for each plan ``apply``, then ``sampled`` or ``answered``. After a
    violation its state means nothing. Used by one thread at a time.

    State over slots; entries of free slots mean nothing.
    """

    def __init__(self, limits: WorkerLimits) -> None:
        self.limits = limits
        slots, pages, size = limits.max_slots, limits.page_count, limits.page_size
        self._width = most_pages(limits)
        self.step = 0
        self.active = np.zeros(slots, bool)
        self.given = np.zeros(slots, np.int64)  # tokens that came with the admission
        self.known = np.zeros(slots, np.int64)  # tokens the worker has, sampled ones included
        self.computed = np.zeros(slots, np.int64)  # tokens whose KV is written
        self.hash = np.zeros(slots, np.uint64)  # of the computed tokens
        self.last_token = np.zeros(slots, np.uint32)  # of the known ones
        self.top_asked = np.full(slots, NOT_ASKED)  # top log-probabilities wanted; NOT_ASKED = not even the token's own
        self.processed = np.zeros(slots, bool)  # log-probabilities are of the distribution drawn from
        # slot -> top log-probabilities of its prompt, position of the first token to score, prompt tokens
        self._scored: dict[int, tuple[int, int, int]] = {}
        self.scores_due: dict[int, ScoresDue] = {}  # by slot, of the plan applied last
        self.page_counts = np.zeros(slots, np.int64)
        self.tables = np.zeros((slots, self._width), np.int32)
        self.prompts: dict[int, np.ndarray] = {}  # slot -> tokens given at admission, uint32
        self._prompt_hashes: dict[int, np.ndarray] = {}
        self._last_prompt: tuple[np.ndarray, np.ndarray] = (NONE, NONE)  # tokens and hashes
        self.holders = np.zeros(pages, np.int64)  # page tables that name the page
        self.kv = np.zeros((pages, size), np.uint64)
        self.page_tokens = np.zeros((pages, size), np.uint32)  # the last token of each hash
        # What the next plan may leave out.
        self.batch = (NONE, NONE)  # slots, token counts
        self.micro_batch_rows = NONE
        self.groups = Groups()
        self._sampling = NONE  # slots that sampled in the plan applied last
        self._told = True  # what they sampled
        # Pages that this plan gives to write on, as (slot or slots, pages).
        self._fresh: list[tuple[int | np.ndarray, np.ndarray]] = []
        self.pages_in_use = self.peak_pages = 0
        self.prefilled_tokens = 0  # computed from what admissions gave

    # -- one step

    def apply(self, plan: plan_pb2.StepPlan) -> np.ndarray:
        """Run one plan; returns the slots that sample a token, int64 in batch order. Raises ``PlanViolation``."""
        if not self._told:
            raise RuntimeError(f"step {self.step}: what was sampled must be told before the next plan")
        try:
            require(plan.step == self.step + 1, f"it follows step {self.step}: expected was {self.step + 1}")
            self._change(plan)
            self._take_batch(plan)
            self._sampling, self._told = self._forward(*self.batch), False
        except PlanViolation as violation:
            violation.step = plan.step
            raise
        self.step = plan.step
        return self._sampling

    def sampled(self, tokens: np.ndarray) -> None:
        """The tokens beside the slots that ``apply`` returned, uint32; ``UNKNOWN_TOKEN`` where there is none."""
        slots, self._told = self._sampling, True
        self.last_token[slots] = tokens
        self.known[slots] += 1

    def answered(self, result: plan_pb2.StepResult | None) -> int:
        """The worker's answer, or None when it never came; returns the number of tokens. Raises ``ResultViolation``."""
        tokens = np.full(len(self._sampling), UNKNOWN_TOKEN, np.uint32)
        if result is None:
            self.sampled(tokens)
            return 0
        slots, given = read_fixed32(result.slots), read_fixed32(result.token_ids)
        failed = [failure.slot for failure in result.failures]
        good = np.isin(self._sampling, failed, invert=True)
        try:
            expect(result.step == self.step, f"it answers step {result.step}")
            expect(len(given) == len(slots), f"{len(given)} tokens for {len(slots)} slots")
            if not np.array_equal(self._sampling[good], slots) or len(failed) != np.count_nonzero(~good):
                wrong = sorted(set(self._sampling.tolist()) ^ {*slots.tolist(), *failed})
                raise ResultViolation(
                    f"{len(slots)} tokens and {len(failed)} failures for {len(good)} rows that sample, or in another"
                    " order",
                    slot=wrong[0] if wrong else None,
                )
            expect((given < self.limits.vocab_size).all(), "a token outside the vocabulary")
            asked = self.top_asked[self._sampling]
            processed = self.processed[slots]
            check_logprobs(result, slots, asked[good], asked[~good], self.limits.vocab_size, processed)
            check_scores(result, self.scores_due, self.limits.vocab_size)
        except Violation as violation:
            violation.step = self.step
            raise
        tokens[good] = given
        self.sampled(tokens)
        return len(given)

    # -- releases, admissions, pages

    def _change(self, plan: plan_pb2.StepPlan) -> None:
        self._fresh.clear()
        for slot in plan.release_slots:
            self._release(slot)
        for admission in plan.admissions:
            self._admit(admission)
        self._append(_integers(plan.append_slots), _integers(plan.append_pages))
        if self._fresh:
            self._check_fresh()
        self._copy(_integers(plan.copy_source_pages), _integers(plan.copy_target_pages))
        for admission in plan.admissions:
            self._check_cached(admission.slot, admission.cached_tokens)
        self.peak_pages = max(self.peak_pages, self.pages_in_use)

    def _release(self, slot: int) -> None:
        require(slot < self.limits.max_slots and self.active[slot], "released, and it is free", slot=slot)
        self.active[slot] = False
        pages = self.tables[slot, : self.page_counts[slot]]
        self.holders[pages] -= 1
        self.pages_in_use -= int(np.count_nonzero(self.holders[pages] == 0))
        del self.prompts[slot], self._prompt_hashes[slot]
        self._scored.pop(slot, None)

    def _admit(self, admission: plan_pb2.Admission) -> None:
        limits, slot, cached = self.limits, admission.slot, admission.cached_tokens
        tokens, pages = read_fixed32(admission.token_ids), _integers(admission.pages)
        check_admission(admission, tokens, pages, limits)
        require(not self.active[slot], "admission, and it is taken", slot=slot)
        self.active[slot] = True
        self.given[slot] = self.known[slot] = len(tokens)
        self.computed[slot], self.page_counts[slot] = cached, len(pages)
        if not np.array_equal(tokens, self._last_prompt[0]):  # siblings come together
            self._last_prompt = tokens, prefix_hashes(tokens)
        self.prompts[slot], self._prompt_hashes[slot] = tokens, hashes = self._last_prompt
        self.hash[slot] = hashes[cached - 1] if cached else 0
        self.last_token[slot] = tokens[-1]
        sampling = admission.sampling
        self.processed[slot] = sampling.processed_logprobs
        self.top_asked[slot] = sampling.top_logprobs if sampling.logprobs else NOT_ASKED
        if sampling.HasField("prompt_logprobs"):
            start = max(1, sampling.prompt_logprobs_start)
            self._scored[slot] = sampling.prompt_logprobs, start, admission.prompt_tokens or len(tokens)
        self.tables[slot, : len(pages)] = pages
        self.pages_in_use += int(np.count_nonzero(self.holders[pages] == 0))
        self.holders[pages] += 1
        self._fresh.append((slot, pages[cached // limits.page_size :]))

    def _append(self, slots: np.ndarray, pages: np.ndarray) -> None:
        require(len(slots) == len(pages), f"{len(slots)} append_slots and {len(pages)} append_pages")
        if not len(slots):
            return
        require_each(slots < self.limits.max_slots, "pages for a slot that does not exist", slots=slots)
        require_each(self.active[slots], "pages for a free slot", slots=slots)
        require_each(pages < self.limits.page_count, "a page outside the pool", slots=slots, pages=pages)
        # Of several pages for one slot, the first comes first.
        order = np.argsort(slots, kind="stable")
        ordered = slots[order]
        place = np.empty(len(slots), np.int64)
        place[order] = np.arange(len(slots)) - np.searchsorted(ordered, ordered)
        place += self.page_counts[slots]
        require_each(place < self._width, "a page table longer than the context", slots=slots)
        self.tables[slots, place] = pages
        np.add.at(self.page_counts, slots, 1)
        self.pages_in_use += int(np.count_nonzero(self.holders[pages] == 0))
        np.add.at(self.holders, pages, 1)
        self._fresh.append((slots, pages))

    def _check_fresh(self) -> None:
        """Pages given to write on belong to nobody else."""
        pages = np.concatenate([pages for _, pages in self._fresh])
        alone = self.holders[pages] == 1
        if not alone.all():
            slots = np.concatenate([np.broadcast_to(slots, pages.shape) for slots, pages in self._fresh])
            require_each(alone, "given to be written on, and another sequence holds it", slots=slots, pages=pages)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        require(len(sources) == len(targets), f"{len(sources)} pages to copy and {len(targets)} to copy onto")
        if not len(sources):
            return
        require_each(sources < self.limits.page_count, "copied, and outside the pool", pages=sources)
        fresh = np.concatenate([pages for _, pages in self._fresh]) if self._fresh else NONE
        require_each(
            np.isin(targets, fresh), "copied onto, and this plan gives it to nobody to write on", pages=targets
        )
        require_each(~np.isin(targets, sources), "both copied and copied onto", pages=targets)
        require(len(np.unique(targets)) == len(targets), "a page copied onto twice")
        self.kv[targets] = self.kv[sources]
        self.page_tokens[targets] = self.page_tokens[sources]

    def _check_cached(self, slot: int, cached: int) -> None:
        size = self.limits.page_size
        pages = self.tables[slot, : -(-cached // size)]
        same = self.kv[pages].reshape(-1)[:cached] == self._prompt_hashes[slot][:cached]
        if not same.all():
            at = int(same.argmin())
            raise PlanViolation(f"it does not hold the token at {at}", slot=slot, page=int(pages[at // size]))

    # -- the batch

    def _take_batch(self, plan: plan_pb2.StepPlan) -> None:
        limits, parts = self.limits, _integers(plan.micro_batch_rows)
        renewed = plan.HasField("batch")
        if renewed:
            slots, counts = _integers(plan.batch.slots), _integers(plan.batch.token_counts)
            require_each(slots < limits.max_slots, "in the batch, and it does not exist", slots=slots)
            require(len(counts) in (0, len(slots)), f"{len(counts)} token_counts for {len(slots)} rows")
            counts = counts if len(counts) else np.ones(len(slots), np.int64)
            require_each(counts >= 1, "in the batch with nothing to compute", slots=slots)
            require_each(np.bincount(slots, minlength=1)[slots] == 1, "twice in the batch", slots=slots)
            total = int(counts.sum())
            require(total <= limits.max_tokens_per_step, f"{total} tokens, at most {limits.max_tokens_per_step}")
            check_micro_batches(parts, len(slots), max(1, limits.max_micro_batches))
            self.batch, self.micro_batch_rows = (slots, counts), parts
        else:
            require(not len(parts), "micro_batch_rows without a batch")
        slots, _ = self.batch
        require_each(self.active[slots], "in the batch, and it is free", slots=slots)
        if plan.HasField("hydragen"):
            message = plan.hydragen
            self.groups = Groups(*(_integers(a) for a in (message.starts, message.counts, message.prefix_pages)))
            require(limits.hydragen or not len(self.groups.starts), "Hydragen groups, and the worker takes none")
            renewed = True
        if renewed or plan.admissions:
            check_groups(
                self.groups, slots, self.micro_batch_rows, tables=self.tables, page_counts=self.page_counts,
                computed=self.computed, page_size=limits.page_size,
            )  # fmt: skip

    def _forward(self, slots: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        start = self.computed[slots]
        ends = start + counts
        require_each(ends <= self.known[slots], "computes more tokens than are known", slots=slots)
        require_each(ends < self.limits.max_context_tokens, "computes past the context", slots=slots)
        require_each(ends <= self.page_counts[slots] * self.limits.page_size, "computes past its pages", slots=slots)
        self.scores_due = self._due(slots, start, ends) if self._scored else {}
        single = start >= self.given[slots] - 1
        self._compute_last(slots[single])
        for slot, count in zip(slots[~single].tolist(), counts[~single].tolist(), strict=True):
            self._prefill(slot, count)
        sampling: npt.NDArray[np.int64] = slots[ends == self.known[slots]]
        return sampling

    def _due(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> "dict[int, ScoresDue]":
        due = {}
        for slot, start, end in zip(slots.tolist(), starts.tolist(), ends.tolist(), strict=True):
            if slot in self._scored:
                top, first, prompt = self._scored[slot]
                begin, stop = max(start + 1, first), min(end + 1, prompt)
                if begin < stop:
                    due[slot] = ScoresDue(begin, stop, top)
        return due

    def _compute_last(self, slots: np.ndarray) -> None:
        """Each slot computes its last known token: the one sampled last, or the last one given."""
        size, position, tokens = self.limits.page_size, self.computed[slots], self.last_token[slots]
        pages = self.tables[slots, position // size]
        require_each(self.holders[pages] == 1, "written to, and others hold it too", slots=slots, pages=pages)
        self.hash[slots] = next_hashes(self.hash[slots], tokens)
        self.kv[pages, position % size] = self.hash[slots]
        self.page_tokens[pages, position % size] = tokens
        self.computed[slots] = position + 1
        self.prefilled_tokens += int(np.count_nonzero(position < self.given[slots]))

    def _prefill(self, slot: int, count: int) -> None:
        """Computes ``count`` of the tokens given; they are all that is known."""
        size, start = self.limits.page_size, int(self.computed[slot])
        positions = np.arange(start, start + count)
        pages = self.tables[slot, positions // size]
        if not (self.holders[pages] == 1).all():
            page = int(pages[self.holders[pages] != 1][0])
            raise PlanViolation("written to, and others hold it too", slot=slot, page=page)
        self.kv[pages, positions % size] = self._prompt_hashes[slot][positions]
        self.page_tokens[pages, positions % size] = self.prompts[slot][positions]
        self.hash[slot] = self._prompt_hashes[slot][start + count - 1]
        self.computed[slot] += count
        self.prefilled_tokens += count


def _integers(field: Sequence[int]) -> npt.NDArray[np.int64]:
    """Signed and wide, so that arithmetic on indices cannot wrap."""
    return read_fixed32(field).astype(np.int64)
