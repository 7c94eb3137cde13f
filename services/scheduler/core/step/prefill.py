"""Admits waiting samples, and computes their prompts in chunks."""

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import NamedTuple

import numpy as np

from services.common.errors import Internal
from services.common.plan.types import Admission
from services.scheduler.core.future.admission import AdmissionControl
from services.scheduler.core.future.prediction import Prediction
from services.scheduler.core.future.sequences import Sequences
from services.scheduler.core.future.time_sharing import KeyTimeSlice
from services.scheduler.core.life.entry import Entry, Lengths, Prepared
from services.scheduler.core.life.lifecycle import Lifecycle
from services.scheduler.core.memory.prefix_tree import PageName
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import FinishReason, Request, Sample
from services.scheduler.core.state import State

# Most admissions of one plan. Each runs Python, for which the running sequences wait.
MOST_ADMISSIONS = 512
_MOST_LOOKED_UP = 512 * 1024  # tokens of prompts looked up in the prefix tree for one plan
# Most bytes of the admissions of one plan without their pages. With any page size, the message is then below its limit
# of 64 MiB. A larger admission is alone in its plan, and must be below the second limit with its pages.
_MOST_BYTES = 24 * 1024 * 1024
_MOST_BYTES_ALONE = 48 * 1024 * 1024
# Most bytes of experts of cached tokens that the samples of one plan want, unless one sample wants more. The result of
# the plan carries all of them.
_MOST_ROUTED_BYTES = 8 * 1024 * 1024
_MOST_LATER = 64  # requests that wait in one plan because their prefix is being computed
_MOST_OVERTAKEN = 1024  # samples that may be admitted before the first sample of the queue, which does not fit

Rows = list[tuple[int, int]]  # (slot, tokens) of prefilling rows


class Prefill:
    """Fills the part of a step that decoding leaves with prompts. Owned by the core."""

    def __init__(
        self, state: State, lifecycle: Lifecycle, prediction: Prediction, admission: type[AdmissionControl]
    ) -> None:
        self._state = state
        self._lifecycle = lifecycle
        self._prediction = prediction
        self._admission = admission

    def continue_prefill(self, plan: PlannedStep, budget: int, time_slice: KeyTimeSlice | None = None) -> Rows:
        """Compute the next chunks of prompts that were begun."""
        slots, rows = self._state.pool.slots, []
        for slot in self._state.pool.prefilling:
            if budget == 0:
                break
            if time_slice is not None and time_slice.paused[slot]:
                continue
            rows.append((slot, min(int(slots.given[slot] - slots.scheduled[slot]), budget)))
            budget -= rows[-1][1]
        self._compute(plan, rows)
        return rows

    def share_prefill(self, plan: PlannedStep, budget: int, now_ns: int, time_slice: KeyTimeSlice | None) -> Rows:
        """Compute chunks of prompts of several keys: of those that were begun, and of samples that are admitted.

        Each key gets the same part of ``budget``, or less if it needs less. The others get the rest.
        """
        state, slots = self._state, self._state.pool.slots
        begun = [slot for slot in state.pool.prefilling if time_slice is None or not time_slice.paused[slot]]
        keys = {slot: slots.samples[slot].request.fairness_key for slot in begun}
        missing = {slot: int(slots.given[slot] - slots.scheduled[slot]) for slot in begun}
        wanted = {keys[slot]: missing[slot] for slot in begun}
        for _, key, given in state.queue.waiting.flows():
            if time_slice is None or key in time_slice.keys:
                wanted[key] = wanted.get(key, 0) + given
        parts = _fair_parts(wanted, budget)
        rows = [(slot, tokens) for slot in begun if (tokens := min(missing[slot], parts[keys[slot]]))]
        self._compute(plan, rows)
        left = budget - sum(tokens for _, tokens in rows)
        admitted = self.admit(plan, left, now_ns, time_slice)
        left -= sum(tokens for _, tokens in admitted)
        more = []
        for slot in begun:
            if tokens := min(int(slots.given[slot] - slots.scheduled[slot]), left):
                more.append((slot, tokens))
                left -= tokens
        self._compute(plan, more)
        total: dict[int, int] = {}
        for slot, tokens in (*rows, *more):
            total[slot] = total.get(slot, 0) + tokens
        return [*total.items(), *admitted]

    def admit(self, plan: PlannedStep, budget: int, now_ns: int, time_slice: KeyTimeSlice | None = None) -> Rows:
        """Admit waiting samples in order, as long as the first chunk of each has room and the forecast allows.

        A sample whose prefix is being computed waits for the next plan. Before a sample that does not fit, a limited
        number of others may be admitted that leave it its pages in the forecast.
        """
        state = self._state
        if budget == 0 or not state.queue.waiting or state.pool.slots.running == state.pool.shape.max_running:
            return []
        room = min(MOST_ADMISSIONS, state.pool.shape.max_running - state.pool.slots.running)
        waiting = state.in_order(2 * MOST_ADMISSIONS)
        if time_slice is not None:
            waiting = [sample for sample in waiting if sample.request.fairness_key in time_slice.keys]
        if state.pool.prefilling:  # a key has at most one partly computed prompt
            keys = {state.pool.slots.samples[slot].request.fairness_key for slot in state.pool.prefilling}
            waiting = [sample for sample in waiting if sample.request.fairness_key not in keys]
        entries = self.gather(plan, waiting, budget, room)
        if not entries:
            return []
        candidates = self.candidates(plan, entries, budget)
        self._expect_delay(plan, candidates)
        samples, admission = candidates.samples, self._admission(state, plan.step)
        chosen = self._note_overtaken(samples, admission.select(candidates.sequences, candidates.classes))
        if len(chosen) == 0:
            return self._make_room(plan, samples[0], budget, now_ns, time_slice)
        return self._enter(plan, _only(entries, chosen), candidates.lengths.take(chosen), now_ns)

    def gather(self, plan: PlannedStep, waiting: Iterable[Sample], budget: int, room: int) -> list[Entry]:
        """Return entries for the samples of ``waiting`` whose prefix is ready. Changes nothing.

        ``room`` slots and ``budget`` tokens bound their number.
        """
        entries = []
        looked_up = size = routed = 0  # tokens; bytes; bytes of experts of cached tokens, at most
        later: set[Request] = set()
        claimed: set[PageName] = set()  # pages that an earlier entry adds to the prefix tree
        siblings: dict[Request, list[Sample]] = {}
        for sample in waiting:
            if budget <= 0 or room == 0 or len(later) == _MOST_LATER or looked_up > _MOST_LOOKED_UP:
                break
            request = sample.request
            if request in later:
                continue
            more = request.admission_bytes + 4 * len(sample.generated)
            if size and size + more > _MOST_BYTES:
                break
            experts = self._routed_bytes(sample)
            if routed and routed + experts > _MOST_ROUTED_BYTES:
                break
            if request in siblings and not len(sample.generated):
                size, routed = size + more, routed + experts
                siblings[request].append(sample)
                budget, room = budget - 1, room - 1
                continue
            looked_up += sample.given
            entry = None
            try:
                entry = self._entry(plan, sample, claimed)
            except Exception as error:
                self._state.queue.fail(request, error)
            if entry is None:
                later.add(request)
                continue
            if entry.shared:
                siblings[request] = entry.samples
            elif entry.leads:
                later.add(request)
            entries.append(entry)
            size, routed = size + more, routed + experts
            budget, room = budget - (len(entry.tokens) - entry.cached), room - 1
        return entries

    def _routed_bytes(self, sample: Sample) -> int:
        """Return the bytes of the experts that the first result of ``sample`` carries, if all its tokens are cached."""
        layout = self._state.pool.shape.routed_experts
        return 0 if sample.routed < 0 or layout is None else (sample.given - sample.routed) * layout.token_bytes

    def _entry(self, plan: PlannedStep, sample: Sample, claimed: set[PageName]) -> Entry | None:
        """Return the entry of ``sample``, or None while it waits for another sample.

        A sent plan or an earlier entry computes more of its prefix, or log-probabilities of its prompt.
        """
        state, request, size = self._state, sample.request, self._state.pool.shape.page_size
        share, tokens = request.share, sample.tokens
        alone = request.admission_bytes + 4 * (len(sample.generated) - (-len(tokens) // size))
        if alone > _MOST_BYTES_ALONE:
            raise Internal(f"the sequence takes {alone} bytes of a plan, which carries {_MOST_BYTES_ALONE} at most")
        if request.being_scored:
            return None
        if share is not None and not len(sample.generated) and not request.unscored:
            if not 0 < share.ready_step <= plan.step:
                return None
            cached = len(tokens) - 1
            return Entry([sample], tokens, cached, share.node, share.last_page, shared=True,
                         left_behind=self._left_behind(cached))  # fmt: skip
        # The page of the last token is never taken from the tree, because sampling needs this token to be computed.
        most = (request.scored if request.unscored else len(tokens) - 1) // size
        node, early = state.pool.tree.match(tokens, request.salt, most, plan.step)
        if early:
            return None
        at = int(state.pool.tree.depth[node])
        leads = share is None and request.waiting > 1 and len(tokens) > 1 and not len(sample.generated)
        # A leader keeps the page of its last token, which the other samples copy.
        if at < (len(tokens) - leads) // size:
            key = state.pool.tree.key(tokens, request.salt, node, at)
            if key in claimed and at < most:
                return None
            claimed.add(key)
        left_behind = 0 if leads else self._left_behind(at * size)
        return Entry([sample], tokens, at * size, node, leads=leads, left_behind=left_behind)

    def _left_behind(self, cached: int) -> int:
        """Return the number of leading pages that a sample with ``cached`` tokens does not hold."""
        return int(self._state.pool.shape.pages_left_behind(np.array(cached)))

    def candidates(self, plan: PlannedStep, entries: list[Entry], budget: int) -> "Candidates":
        """Return ``entries`` as the forecast needs them, if ``plan`` admits them with ``budget`` tokens."""
        state, size = self._state, self._state.pool.shape.page_size
        samples = [sample for entry in entries for sample in entry.samples]
        counts = [len(entry.samples) for entry in entries]
        rows = [
            (len(entry.tokens), entry.cached, entry.node, entry.lent_pages(size), entry.left_behind)
            for entry in entries
        ]
        given, cached, node, lent, left_behind = np.repeat(np.array(rows, np.int64), counts, axis=0).T
        missing = given - cached
        # Only the last candidate can get less of this step than it needs, or none if others are not admitted.
        rest, least = np.maximum(np.cumsum(missing) - budget, 0), np.maximum(missing - budget, 0)
        rest[rest > 0] += state.pool.tokens_to_prefill()  # prompts of other keys are computed beside it
        total, quantile = self._prediction.totals(samples)
        limit = np.array([sample.request.limit for sample in samples], np.int64)
        slowest = max(1, state.pool.shape.max_tokens_per_step - state.pool.slots.running - len(samples))
        latest = -(-rest // slowest)
        end = latest + total - 1 - given + state.queue.steps_ahead
        delay = -(-least // state.pool.shape.max_tokens_per_step)
        slot = np.full(len(samples), -1)
        sequences = Sequences(given, limit, -(-given // size), delay, latest, end, node, lent, left_behind, slot)
        classes = np.array([-1 if sample.guaranteed else sample.request.length_class_id for sample in samples])
        return Candidates(samples, sequences, classes, Lengths(total, quantile, plan.step + end))

    def _expect_delay(self, plan: PlannedStep, candidates: "Candidates") -> None:
        """Postpone the latest ends of partly computed prompts, as if all ``candidates`` were computed first."""
        state, slots = self._state, self._state.pool.slots
        if not state.pool.prefilling:
            return
        begun = np.array(state.pool.prefilling, np.int64)
        length, count = candidates.sequences.length, len(candidates.samples)
        slowest = max(1, state.pool.shape.max_tokens_per_step - slots.running - count)
        prefill = -(-(state.pool.tokens_to_prefill() + int(length.sum())) // slowest)
        end = plan.step + prefill + slots.total[begun] - slots.given[begun] + state.queue.steps_ahead
        slots.end_step[begun] = np.maximum(slots.end_step[begun], end)

    def _enter(self, plan: PlannedStep, entries: list[Entry], lengths: Lengths, now_ns: int) -> Rows:
        state, rows = self._state, []
        budget = state.pool.shape.max_tokens_per_step - plan.tokens
        entries, lengths, prepared = self._prepare(entries, lengths)
        if not entries:
            return []
        for entry in entries:
            if (request := entry.samples[0].request).unscored and not entry.shared:
                request.scorer = entry.samples[0]
        placed = self._lifecycle.admit(entries, prepared, lengths, plan.step, now_ns)
        copies: list[tuple[int, int]] = []  # (source page, target page)
        admissions: list[Admission] = []
        for entry, (slots, tables) in zip(entries, placed, strict=True):
            request = entry.samples[0].request
            if entry.copied_page >= 0:
                whole = int(state.pool.tree.depth[entry.node])
                copies += [(entry.copied_page, page) for page in tables[:, whole].tolist()]
            rest = [(sample.index, sample.routed if sample.routed >= 0 else None) for sample in entry.samples]
            admissions += [
                Admission(
                    slot,
                    entry.tokens,
                    entry.cached,
                    pages,
                    request.sampling,
                    request.prompt_tokens,
                    index,
                    request.traced,
                    routed,
                )
                for slot, pages, (index, routed) in zip(slots.tolist(), tables, rest, strict=True)
            ]
            plan.admitted_ids += [request.request_id] * len(rest)
            if entry.leads:
                self._lifecycle.shares.begin(entry.samples[0])
            missing = len(entry.tokens) - entry.cached
            for sample in entry.samples:
                rows.append((sample.slot, min(missing, budget)))
                budget -= rows[-1][1]
        plan.admissions = admissions
        if copies:
            plan.copy_sources, plan.copy_targets = np.array(copies, np.int64).T
        self._compute(plan, rows)
        return rows

    def _prepare(self, entries: list[Entry], lengths: Lengths) -> tuple[list[Entry], Lengths, list[Prepared]]:
        """Return the entries that can be admitted, and what goes into their slots."""
        prepared: list[Prepared | None] = []
        for entry in entries:
            ready = None
            try:
                ready = self._lifecycle.prepare(entry)
            except Exception as error:
                self._state.queue.fail(entry.samples[0].request, error)
            prepared.append(ready)
        if None in prepared:
            sound = [each is not None for each in prepared]
            rows = np.repeat(sound, [len(entry.samples) for entry in entries])
            entries, lengths = list(compress(entries, sound)), lengths.take(rows)
        return entries, lengths, [each for each in prepared if each is not None]

    def _compute(self, plan: PlannedStep, rows: Rows) -> None:
        """Schedule more of the known tokens of slots: ``rows`` are (slot, tokens)."""
        if not rows:
            return
        state, slots = self._state, self._state.pool.slots
        chosen, counts = np.array(rows, np.int64).T
        total = int(counts.sum())
        plan.tokens, plan.prefill_tokens = plan.tokens + total, plan.prefill_tokens + total
        slots.scheduled[chosen] += counts
        # The page of the last token of a shared prompt stays the leader's, as the other samples copy it.
        registered = slots.scheduled[chosen] - (slots.lent_pages[chosen] > 0)
        self._lifecycle.register_pages(chosen, registered, ready_step=plan.step + 1)
        missing = slots.given[chosen] - slots.scheduled[chosen]
        slots.delay[chosen] = -(-missing // state.pool.shape.max_tokens_per_step)
        state.pool.prefilling = [slot for slot in state.pool.prefilling if slot not in chosen] + chosen[
            missing > 0
        ].tolist()
        complete = chosen[missing == 0]
        if len(complete):  # their ends are exact from now on
            decoding = slots.total[complete] - 1 - slots.given[complete]
            slots.end_step[complete] = (
                plan.step + decoding + state.queue.steps_ahead
            )  # the last result is received this number of plans later
            plan.sampling.append(complete)
        for slot in complete[slots.lent_pages[complete] > 0].tolist():
            self._lifecycle.shares.prompt_computed(slots.samples[slot], plan.step)

    def _note_overtaken(self, samples: list[Sample], chosen: np.ndarray) -> np.ndarray:
        """Return the indices to admit, of the indices ``chosen`` into ``samples``.

        Counts the samples that are admitted before the first sample that is not. If that are too many so far, samples
        after it are not admitted.
        """
        gaps = np.flatnonzero(chosen != np.arange(len(chosen)))
        if not len(gaps):
            return chosen
        first = int(gaps[0])
        waiting = samples[first]
        if waiting.overtaken >= _MOST_OVERTAKEN:
            return chosen[:first]
        waiting.overtaken += len(chosen) - first
        self._state.queue.counters.overtakes += len(chosen) - first
        return chosen

    def _make_room(
        self, plan: PlannedStep, head: Sample, budget: int, now_ns: int, time_slice: KeyTimeSlice | None
    ) -> Rows:
        """Release prompts that are held for other samples, as the first sample of the queue does not fit.

        If nothing runs, its own shared prompt is released too. A sample that does not fit even then ends with an error.
        """
        state = self._state
        idle = state.pool.slots.running == 0
        released = [request for request in state.pool.sharing if idle or request is not head.request]
        for request in released:
            self._lifecycle.shares.end(request)
        if not idle:
            return []
        if not released:
            error = Internal("the sequence does not fit the KV cache by itself")
            self._lifecycle.end([head], FinishReason.ERROR, error)
        return self.admit(plan, budget, now_ns, time_slice)


class Candidates(NamedTuple):
    """The samples of all entries, with columns beside them."""

    samples: list[Sample]
    sequences: Sequences
    classes: np.ndarray  # int64, of the length predictor, -1 = guaranteed
    lengths: Lengths


def _fair_parts(wanted: Mapping[str, int], budget: int) -> dict[str, int]:
    """Divide ``budget`` equally between keys. A key that wants less than its part leaves the rest to the others."""
    parts, left = {}, budget
    for at, (key, tokens) in enumerate(sorted(wanted.items(), key=lambda each: each[1])):
        parts[key] = min(tokens, -(-left // (len(wanted) - at)))
        left -= parts[key]
    return parts


def _only(entries: list[Entry], chosen: np.ndarray) -> list[Entry]:
    """Return the entries with the samples at the indices ``chosen`` (ascending, over all entries) only."""
    ends = np.cumsum([len(entry.samples) for entry in entries])
    if len(chosen) == ends[-1]:
        return entries
    kept, before, at = [], 0, 0
    for entry, end, upto in zip(entries, ends.tolist(), np.searchsorted(chosen, ends).tolist(), strict=True):
        if upto - before == end - at:
            kept.append(entry)
        elif upto > before:
            kept.append(entry._replace(samples=[entry.samples[index - at] for index in chosen[before:upto].tolist()]))
        before, at = upto, end
    return kept
