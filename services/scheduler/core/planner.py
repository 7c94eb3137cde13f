"""Builds one plan: continuous batching with chunked prefill."""

from itertools import islice

import numpy as np

from services.scheduler.core.admission import Admission
from services.scheduler.core.forecast import Candidate
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.pages import FAR
from services.scheduler.core.plan import NO_SLOTS, Plan, SlotAdmission
from services.scheduler.core.request import FinishReason, Request, Sample
from services.scheduler.core.state import State

# Admissions are per-sequence Python; so many at most go into one plan, that running sequences do not wait for them.
MOST_ADMISSIONS = 256
_MOST_LATER = 64  # requests passed over in one plan because their prefix is being computed
_LATER, _NO_ROOM = -1, -2  # instead of a slot


class Planner:
    """State advances when a plan is built: lengths count what every plan sent will have computed. Owned by the core."""

    def __init__(self, state: State, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._last_slots = self._last_counts = NO_SLOTS

    def build(self, now_ns: int) -> Plan | None:
        """The next plan, or None when there is nothing to compute."""
        state = self._state
        plan = Plan(step=state.step + 1)
        decoding = self._decode(plan)
        prefilling = self._continue_prefill(plan, state.shape.max_tokens_per_step - len(decoding))
        prefilling += self._admit(plan, state.shape.max_tokens_per_step - len(decoding) - plan.prefill_tokens, now_ns)
        if len(decoding) == 0 and not prefilling:
            return None
        # Not sooner: a page that this plan copies from must not be a page that it copies onto.
        for request in [request for request in state.sharing if not request.waiting]:
            self._lifecycle.end_share(request)
        state.step = plan.step
        state.counters.steps += 1
        plan.released = [slot for slot, _ in state.to_release]
        plan.released_ids = [request_id for _, request_id in state.to_release]
        state.to_release = []
        self._set_batch(plan, decoding, prefilling)
        return plan

    def _decode(self, plan: Plan) -> np.ndarray:
        """One more token for every sequence that is past its prompt, and the pages where those tokens go."""
        state, slots = self._state, self._state.slots
        decoding = slots.decoding()
        position = slots.scheduled[decoding]
        full = decoding[position >= slots.page_count[decoding] * state.shape.page_size]
        if len(full):
            pages = state.pool.take(len(full), slots.end_step[full])
            slots.table[full, slots.page_count[full]] = pages
            slots.page_count[full] += 1
            # If its token is not known yet, the result will write it.
            state.pool.tokens[pages, 0] = slots.last_token[full]
            plan.append_slots, plan.append_pages = full, pages
        slots.scheduled[decoding] = position + 1
        plan.sampled = plan.tokens = len(decoding)
        return decoding

    def _continue_prefill(self, plan: Plan, budget: int) -> list[tuple[int, int]]:
        """The next chunks of prompts that were begun: (slot, tokens) each."""
        rows = []
        for slot in list(self._state.prefilling):
            if budget == 0:
                break
            count = self._prefill(plan, slot, budget)
            rows.append((slot, count))
            budget -= count
        return rows

    def _admit(self, plan: Plan, budget: int, now_ns: int) -> list[tuple[int, int]]:
        """Let in waiting samples, in order, as long as the first chunk of each has room and the forecast allows.

        Nobody overtakes a sample that does not fit. One whose prefix is being computed now is first again next time.
        """
        state, rows = self._state, []
        if budget == 0 or not state.waiting or state.slots.running == state.shape.max_running:
            return rows
        later: set[Request] = set()
        admission = Admission(state.pool, state.slots, plan.step, state.sharing.values())
        for sample in list(islice(state.waiting, 2 * MOST_ADMISSIONS)):
            full = state.slots.running == state.shape.max_running
            if budget == 0 or full or len(rows) == MOST_ADMISSIONS or len(later) == _MOST_LATER:
                break
            if sample.request in later:
                continue
            slot = self._try(plan, sample, admission, budget, now_ns)
            if slot == _LATER:
                later.add(sample.request)
                continue
            if slot == _NO_ROOM:
                return rows or self._make_room(plan, sample, budget, now_ns)
            count = self._prefill(plan, slot, budget)
            rows.append((slot, count))
            budget -= count
        return rows

    def _try(self, plan: Plan, sample: Sample, admission: Admission, budget: int, now_ns: int) -> int:
        """Admit ``sample`` if its prefix is ready and it fits; returns its slot, or why it has none."""
        state, request = self._state, sample.request
        shares_prompt = request.share is not None and not len(sample.generated)
        if shares_prompt:
            if not 0 < request.share.ready_step <= plan.step:
                return _LATER
            cached = sample.given - 1
            hits = request.share.pages[: cached // state.shape.page_size]
        else:
            hits = self._match(plan, sample)
            if hits is None:
                return _LATER
            cached = len(hits) * state.shape.page_size
        end = plan.step + self._steps_to_end(sample, cached, budget)
        leads = not shares_prompt and request.share is None and request.waiting > 1 and len(request.tokens) > 1
        leads = leads and not len(sample.generated)
        if len(hits):
            admission.settle_ends()
        if not admission.admit(self._candidate(plan, sample, hits, end, cached, budget, leads)):
            return _NO_ROOM
        state.pool.hold(hits, end)
        needed = -(-sample.given // state.shape.page_size) - len(hits)
        pages = np.concatenate((hits, state.pool.take(needed, end)))
        if shares_prompt and cached % state.shape.page_size:
            plan.copies.append((int(request.share.pages[len(hits)]), int(pages[len(hits)])))
        self._write_tokens(sample, pages, len(hits))
        slot = self._lifecycle.enter(sample, cached, pages, end, plan.step, now_ns)
        state.prefilling.append(slot)
        if leads:
            self._lifecycle.begin_share(sample, pages)
        plan.admissions.append(SlotAdmission(slot, sample.tokens, cached, pages, request.sampling, sample.index))
        plan.admitted_ids.append(request.request_id)
        return slot

    def _match(self, plan: Plan, sample: Sample) -> np.ndarray | None:
        """Cached pages the sample begins with; None when a plan on its way computes more of them: wait for it.

        The page of the last token is never among them: that token is computed, to sample behind it.
        """
        state, request = self._state, sample.request
        if not state.prefix_caching:
            return np.zeros(0, np.int32)
        most = (sample.given - 1) // state.shape.page_size
        hits, early = state.tree.match(sample.tokens, request.cache_salt, most, plan.step)
        return None if early else hits

    def _steps_to_end(self, sample: Sample, cached: int, budget: int) -> int:
        """Steps from now until the plan that releases the sample, if it runs to its limit as slowly as it can.

        Later chunks get what decoding leaves of a step, and nobody else is admitted meanwhile. The last result arrives
        ``steps_ahead`` plans after its own at the latest.
        """
        state = self._state
        rest = max(0, sample.given - cached - budget)
        slowest = state.shape.max_tokens_per_step - state.slots.running
        decode_steps = sample.request.limit - 1 - sample.given
        return -(-rest // max(1, slowest)) + decode_steps + state.steps_ahead

    def _candidate(
        self, plan: Plan, sample: Sample, hits: np.ndarray, end: int, cached: int, budget: int, leads: bool
    ) -> Candidate:
        state, size = self._state, self._state.shape.page_size
        needed = -(-sample.given // size)
        in_use = state.pool.refs[hits] > 0
        ends = state.pool.ends[hits[in_use]]
        kept = ends[ends < (FAR if leads else end)] - plan.step
        new_pages = needed - int(np.count_nonzero(in_use))
        rest = max(0, sample.given - cached - budget)
        first = -(-rest // state.shape.max_tokens_per_step) + 1 + -sample.given % size
        count = max(0, -(-(sample.request.limit - 1) // size) - needed)
        lasting = new_pages + len(kept) if leads else 0
        return Candidate(new_pages, first, count, end - plan.step, kept, lasting)

    def _write_tokens(self, sample: Sample, pages: np.ndarray, first: int) -> None:
        """Note what the fresh pages will hold."""
        size = self._state.shape.page_size
        rest = sample.tokens[first * size :]
        padded = np.zeros((len(pages) - first) * size, np.uint32)
        padded[: len(rest)] = rest
        self._state.pool.tokens[pages[first:]] = padded.reshape(-1, size)

    def _prefill(self, plan: Plan, slot: int, budget: int) -> int:
        """Schedule the next chunk of a slot's known tokens; returns its length."""
        state, slots = self._state, self._state.slots
        missing = int(slots.given[slot] - slots.scheduled[slot])
        count = min(missing, budget)
        slots.scheduled[slot] += count
        plan.tokens += count
        plan.prefill_tokens += count
        if state.prefix_caching:
            self._lifecycle.register_pages(slot, int(slots.scheduled[slot]), ready_step=plan.step + 1)
        if count < missing:
            slots.delay[slot] = -(-(missing - count) // state.shape.max_tokens_per_step)
            return count
        plan.sampled += 1
        slots.delay[slot] = 0
        state.prefilling.remove(slot)
        sample = slots.samples[slot]
        end = plan.step + int(slots.limit[slot] - 1 - slots.given[slot]) + state.steps_ahead
        if end != slots.end_step[slot]:
            state.pool.move_end(slots.pages(slot), int(slots.end_step[slot]), end)
            slots.end_step[slot] = end
        self._lifecycle.share_ready(sample, plan.step)
        return count

    def _make_room(self, plan: Plan, head: Sample, budget: int, now_ns: int) -> list[tuple[int, int]]:
        """The first in the queue does not fit: prompts held for others, who wait behind it, are let go, and with
        nothing running its own is too. A sample that does not fit even then ends with an error, never with a hang."""
        state = self._state
        idle = state.slots.running == 0
        let_go = [request for request in state.sharing if idle or request is not head.request]
        for request in let_go:
            self._lifecycle.end_share(request)
        if not idle:
            return []
        if not let_go:
            self._lifecycle.finish(head, FinishReason.ERROR, error="the sequence does not fit the KV cache by itself")
        return self._admit(plan, budget, now_ns)

    def _set_batch(self, plan: Plan, decoding: np.ndarray, prefilling: list[tuple[int, int]]) -> None:
        """Decoding rows by slot, then prefilling rows in order; left out when nothing about the batch changed."""
        plan.sequences = len(decoding) + len(prefilling)
        slots, counts = decoding, NO_SLOTS
        if prefilling:
            rows = np.array(prefilling, np.int64)
            slots = np.concatenate((decoding, rows[:, 0]))
            counts = np.concatenate((np.ones(len(decoding), np.int64), rows[:, 1]))
        unchanged = not plan.released and not plan.admissions
        if unchanged and np.array_equal(slots, self._last_slots) and np.array_equal(counts, self._last_counts):
            return
        self._last_slots, self._last_counts = slots, counts
        plan.slots, plan.counts = slots, counts if len(counts) else None
