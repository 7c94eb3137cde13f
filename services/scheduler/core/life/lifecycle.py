"""Moves samples into slots and out of them. This is the Python that runs once for each sequence."""

from collections.abc import Iterable, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from services.common.errors import Internal, TokaError
from services.scheduler.core.life.ending import Ending, finish_of, spans_of
from services.scheduler.core.life.entry import Entry, Lengths, Placed, Prepared
from services.scheduler.core.life.sharing import Sharing
from services.scheduler.core.life.stragglers import Stragglers
from services.scheduler.core.life.victims import are_preemptible, protected_lengths
from services.scheduler.core.memory.prefix_tree import ROOT
from services.scheduler.core.request import Finish, FinishReason, Request, Sample
from services.scheduler.core.state import State


class Lifecycle:
    """Keeps slots, pages, tree and queue consistent with each other. Owned by the core."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.shares = Sharing(state)
        self.stragglers = Stragglers(state, self.shares)

    # -- admission

    def prepare(self, entry: Entry) -> Prepared:
        """Return the values that ``admit``, which must follow, puts into slots. If this raises, nothing has changed."""
        state, request = self._state, entry.samples[0].request
        stop_states = [self._stop_state(sample) for sample in entry.samples]
        columns = {
            "given": len(entry.tokens),
            "prompt": request.prompt_tokens,
            "limit": request.limit,
            "min_known": request.prompt_tokens + request.min_tokens,
            "priority": request.priority,
            "parked": request.parked,
            "tail": request.in_tail,
            "scheduled": entry.cached,
            "length_class": request.length_class_id,
            "node": entry.held_node(int(state.pool.tree.depth[entry.node])),
            "left_behind": entry.left_behind,
            "sink": request.sink,
            "last_token": int(entry.tokens[-1]),
            "lent_pages": entry.lent_pages(state.pool.shape.page_size),
            "stop_set": state.queue.stop_tokens.acquire(request.stop_token_ids, len(entry.samples)),
            "key": state.pool.running_keys.acquire(request.fairness_key, len(entry.samples)),
        }
        return Prepared(columns, stop_states)

    def admit(
        self, entries: list[Entry], prepared: list[Prepared], lengths: Lengths, step: int, now_ns: int
    ) -> list[Placed]:
        """Put waiting samples into free slots, with pages for all their known tokens. Return the slots of each entry.

        ``prepared`` is beside ``entries``, and ``lengths`` is beside the samples of all entries.
        """
        state, slots, tree = self._state, self._state.pool.slots, self._state.pool.tree
        counts = np.array([len(entry.samples) for entry in entries])
        samples = [sample for entry in entries for sample in entry.samples]
        for sample in samples:
            state.queue.waiting.remove(sample)
        # All cached pages are held before pages are taken, because taking pages evicts others.
        for entry in entries:
            tree.attach(entry.node, len(entry.samples), entry.left_behind)
        taken = slots.take(len(samples))
        placed = self._fill_tables(entries, counts, taken)
        self._fill_slots(prepared, counts, samples, taken, step)
        slots.preemptible[taken] = are_preemptible(state, samples)
        slots.protected_until[taken] = protected_lengths(samples)
        slots.total[taken], slots.quantile[taken], slots.end_step[taken] = lengths
        for sample, slot in zip(samples, taken.tolist(), strict=True):
            sample.slot = slot
            sample.first_plan_ns = sample.first_plan_ns or now_ns
        for entry in entries:
            self._count_cached(entry)
        state.pool.membership += len(samples)
        return placed

    def _fill_tables(self, entries: list[Entry], counts: np.ndarray, taken: np.ndarray) -> list[Placed]:
        """Fill the page tables of the slots ``taken``, of which an entry has ``counts``. Return them by entry."""
        state, slots, size = self._state, self._state.pool.slots, self._state.pool.shape.page_size
        depths = [int(state.pool.tree.depth[entry.node]) for entry in entries]
        paths = [state.pool.tree.path(entry.node) for entry in entries]  # taking pages may evict pages left behind
        news = [-(-len(entry.tokens) // size) - depth for entry, depth in zip(entries, depths, strict=True)]
        depth, new = np.repeat(np.array([depths, news]), counts, axis=1)
        fresh = state.pool.pages.take(int(new.sum()))
        slots.page_count[taken] = depth + new
        first = np.cumsum(new) - new
        columns = np.arange(len(fresh)) - np.repeat(first - depth, new)
        slots.table[np.repeat(taken, new), columns] = fresh

        held = np.zeros((len(fresh), size), np.uint32)
        placed: list[Placed] = []
        at = page_at = 0
        for entry, path, whole, pages in zip(entries, paths, depths, news, strict=True):
            count = len(entry.samples)
            chosen, own = taken[at : at + count], slice(page_at, page_at + count * pages)
            rest = entry.tokens[whole * size :]
            held[own].reshape(count, -1)[:, : len(rest)] = rest
            table = fresh[own].reshape(count, pages)
            if whole:
                slots.table[chosen, :whole] = path
                table = np.concatenate((np.broadcast_to(path, (count, whole)), table), axis=1)
            if state.pool.shape.window_tokens:
                slots.tokens[chosen, : len(entry.tokens)] = entry.tokens
            placed.append((chosen, table))
            at, page_at = at + count, page_at + count * pages
        state.pool.pages.tokens[fresh] = held
        return placed

    def _fill_slots(
        self, prepared: list[Prepared], counts: np.ndarray, samples: list[Sample], taken: np.ndarray, step: int
    ) -> None:
        slots = self._state.pool.slots
        slots.samples[taken] = samples
        slots.admitted_step[taken], slots.delay[taken] = step, 0
        slots.cache_epoch[taken] = self._state.pool.tree.epoch
        rows = np.array([list(each.columns.values()) for each in prepared], np.int64)
        for name, column in zip(prepared[0].columns, np.repeat(rows, counts, axis=0).T, strict=True):
            getattr(slots, name)[taken] = column
        slots.known[taken] = slots.given[taken]
        slots.observed_age[taken] = slots.given[taken] - slots.prompt[taken]
        for name in ("guaranteed", "handle", "accepted_ns", "first_token_ns", "last_token_ns", "routed"):
            getattr(slots, name)[taken] = list(map(attrgetter(name), samples))
        slots.stop_state[taken] = [stop_state for each in prepared for stop_state in each.stop_states]

    def _stop_state(self, sample: Sample) -> int:
        automaton = sample.request.automaton
        return -1 if automaton is None else self._state.queue.matcher.base(automaton) + sample.stop_state

    def _count_cached(self, entry: Entry) -> None:
        counters = self._state.queue.counters
        for sample in entry.samples:
            if sample.cached_tokens < 0:
                sample.cached_tokens = min(entry.cached, sample.request.prompt_tokens)
                counters.cached_prompt_tokens += sample.cached_tokens
                counters.looked_up_prompt_tokens += sample.request.prompt_tokens
            elif sample.computed_before > entry.cached:
                counters.recomputed_tokens += min(sample.computed_before, len(entry.tokens)) - entry.cached

    # -- ends and preemption

    def end(self, samples: Iterable[Sample], reason: FinishReason, error: TokaError | None = None) -> None:
        """End the unfinished samples among ``samples``."""
        self.finish([Ending(sample, reason, error=error) for sample in samples if not sample.finished])

    def finish(self, endings: Sequence[Ending]) -> None:
        """End samples, whether they run or wait, and output their ends."""
        state, slots = self._state, self._state.pool.slots
        running = []
        for ending in endings:
            if ending.sample.slot >= 0:
                running.append(ending)
            else:
                state.queue.waiting.remove(ending.sample)
        if running:
            at = np.array([ending.sample.slot for ending in running])
            stopped = np.array([ending.reason is FinishReason.STOP for ending in running])
            self._observe(at, stopped)
            for ending, known in zip(running, slots.known[at].tolist(), strict=True):
                ending.sample.known = known
            self._leave(at, [ending.reason is not FinishReason.ERROR for ending in running])
        for ending in endings:
            self._finish(ending)
        for request in dict.fromkeys(ending.sample.request for ending in endings):
            if request.unfinished and request.n > 1:
                self._control_stragglers(request)

    def _control_stragglers(self, request: Request) -> None:
        """End or park the rest of ``request`` if enough of its samples have finished."""
        if request.end_after is not None and request.completed >= request.end_after:
            self.end(request.samples, FinishReason.ABORTED)
        else:
            self.stragglers.sample_ended(request)

    def _observe(self, leaving: np.ndarray, stopped: np.ndarray) -> None:
        """Report the ages of leaving sequences to the length predictor."""
        slots = self._state.pool.slots
        generated = slots.known[leaving] - slots.prompt[leaving]
        self._state.queue.lengths.observe(slots.length_class[leaving], generated, stopped, slots.observed_age[leaving])

    def _finish(self, ending: Ending) -> None:
        state, sample = self._state, ending.sample
        request, reason = sample.request, ending.reason
        sample.finished = True
        request.unfinished -= 1
        request.completed += reason in (FinishReason.STOP, FinishReason.LENGTH)
        if request.request_id:  # the quarantine's canary has no id
            state.queue.counters.sequences_finished += 1
        state.queue.counters.sequences_cancelled += reason is FinishReason.CANCELLED
        if not request.unfinished:
            state.queue.requests.pop(request.request_id, None)
            request.samples.clear()  # breaks reference cycles, which would stay in memory for minutes
            request.scorer = None
        finish = None
        try:
            if request.share is not None and not request.waiting:
                self.shares.end(request)
            if not request.unfinished and request.automaton is not None:
                state.queue.matcher.release(request.automaton)
            finish = finish_of(ending, state.queue.weights_version)
        except Exception as error:
            state.queue.fail(request, error)
        if finish is None:
            finish = Finish(sample.handle, FinishReason.ERROR, request.prompt_tokens, error=Internal.logged())
        state.queue.outbox.finish(request.sink, finish)

    def close_spans(self) -> None:
        """End the span of tokens of every sample, because later tokens are of other weights."""
        queue, slots = self._state.queue, self._state.pool.slots
        for sample in (sample for request in queue.requests.values() for sample in request.samples):
            if not sample.finished:
                known = sample.known if sample.slot < 0 else int(slots.known[sample.slot])
                sample.spans = spans_of(sample, known, queue.weights_version)

    def preempt(self, victims: np.ndarray) -> None:
        """Preempt sequences whose pages are needed because a prediction was wrong."""
        for sample in self._state.pool.slots.samples[victims].tolist():
            sample.preemptions += 1
        self._state.queue.counters.preemptions += len(victims)
        self._interrupt(victims)

    def preempt_for_others(self, victims: np.ndarray, *, to_key: bool = False) -> None:
        """Preempt sequences for samples of a higher class, or of another key."""
        state, slots = self._state, self._state.pool.slots
        # A partly computed prompt loses nothing if its pages stay cached.
        keeps = state.policy.prefix_caching and not to_key
        loses = (slots.scheduled[victims] >= slots.given[victims]) | (not keeps)
        for sample in slots.samples[victims[loses]].tolist():
            sample.preempted_for_others += 1
        state.queue.counters.yields += len(victims)
        self._interrupt(victims)

    def preempt_all(self) -> None:
        """Preempt all running samples, so that others run without them."""
        self._interrupt(self._state.pool.slots.running_slots())

    def end_shares(self) -> None:
        """Release all shared prompts. Samples that wait for one compute the prompt again."""
        for request in list(self._state.pool.sharing):
            self.shares.end(request)

    def _interrupt(self, slots: np.ndarray) -> None:
        """Put the samples in ``slots`` back at the head of the queue, with their tokens."""
        if not len(slots):
            return
        state = self._state
        samples = state.pool.slots.samples[slots].tolist()
        for sample in samples:
            state.pool.preempted.append(sample.request.request_id)
            self._keep_tokens(sample)
        self._observe(slots, np.zeros(len(samples), bool))
        self._leave(slots, [True] * len(samples))
        self._wait_again(samples)

    def requeue_all(self) -> None:
        """Put all running samples back at the head of the queue, with their tokens, after the loss of the worker."""
        state = self._state
        samples = state.pool.slots.running_samples()
        for sample in samples:
            self._keep_tokens(sample)
            self._note_times(sample, sample.slot)
            state.queue.stop_tokens.release(sample.request.stop_token_ids)
            state.pool.running_keys.release(sample.request.fairness_key)
            sample.slot = -1
        for request in state.pool.sharing:
            request.share = None
        self._wait_again(samples)

    def _wait_again(self, samples: list[Sample]) -> None:
        for sample in sorted(samples, key=lambda sample: sample.arrival, reverse=True):
            self._state.queue.waiting.push_front(sample)

    def _keep_tokens(self, sample: Sample) -> None:
        """Store the tokens of a sample that will be admitted again."""
        try:
            self._copy_tokens(sample)
        except Exception as error:  # without its tokens it would repeat them
            self._state.queue.fail(sample.request, error)

    def _copy_tokens(self, sample: Sample) -> None:
        state, slots, slot = self._state, self._state.pool.slots, sample.slot
        sample.generated = self._generated(slot, len(sample.request.tokens))
        sample.known, sample.routed = int(slots.known[slot]), int(slots.routed[slot])
        sample.computed_before = int(slots.scheduled[slot])
        if sample.request.automaton is not None:
            sample.stop_state = int(slots.stop_state[slot]) - state.queue.matcher.base(sample.request.automaton)

    def _generated(self, slot: int, start: int) -> npt.NDArray[np.uint32]:
        """Return the known tokens of a slot from position ``start`` on: uint32."""
        slots, pool = self._state.pool.slots, self._state.pool.pages
        known = int(slots.known[slot])
        if self._state.pool.shape.window_tokens:
            return slots.tokens[slot, start:known].copy()
        tokens: npt.NDArray[np.uint32] = pool.tokens[slots.pages(slot)].reshape(-1)[:known]
        if known > len(tokens):  # the last token has no page yet
            tokens = np.append(tokens, slots.last_token[slot])
        return tokens[start:].astype(np.uint32)

    def _note_times(self, sample: Sample, slot: int) -> None:
        slots = self._state.pool.slots
        sample.first_token_ns, sample.last_token_ns = int(slots.first_token_ns[slot]), int(slots.last_token_ns[slot])

    def _leave(self, leaving: np.ndarray, keep_pages: list[bool]) -> None:
        """Release slots and pages. Computed pages stay cached, unless ``keep_pages`` says that they are wrong."""
        state, slots, tree = self._state, self._state.pool.slots, self._state.pool.tree
        samples = slots.samples[leaving].tolist()
        lent = np.array([self.shares.leader_leaves(*each) for each in zip(samples, keep_pages, strict=True)])
        whole = leaving[np.array(keep_pages) & (lent == 0)]
        computed = np.minimum(slots.known[whole], slots.scheduled[whole])
        self.register_pages(whole, computed, ready_step=state.pool.step + 1)
        nodes = slots.node[leaving]
        own_from = np.maximum(tree.depth[nodes] + lent, slots.left_behind[leaving])
        for sample, slot, node, keep in zip(samples, leaving.tolist(), nodes.tolist(), keep_pages, strict=True):
            if slot in state.pool.prefilling:
                state.pool.prefilling.remove(slot)
            tree.detach(node, int(slots.left_behind[slot]))
            if not keep:
                tree.forget(node)
            state.queue.stop_tokens.release(sample.request.stop_token_ids)
            state.pool.running_keys.release(sample.request.fairness_key)
            self._note_times(sample, slot)
            sample.slot = -1
            state.pool.to_release.append((slot, sample.request.request_id))
        state.pool.pages.give(slots.entries(leaving, own_from, slots.page_count[leaving]))
        slots.give(leaving)
        state.pool.membership += len(leaving)

    def register_pages(self, chosen: np.ndarray, lengths: np.ndarray, ready_step: int) -> None:
        """Add the whole pages of the first ``lengths`` tokens to the prefix tree, for plans from ``ready_step`` on."""
        state, slots, tree = self._state, self._state.pool.slots, self._state.pool.tree
        nodes, ends = slots.node[chosen], lengths // state.pool.shape.page_size
        # Pages are found from the first page of a sequence on only, so later ones are not added without it.
        depth = tree.depth[nodes]
        more = np.flatnonzero((depth < ends) & (slots.left_behind[chosen] <= depth))
        columns = (chosen[more], nodes[more], tree.depth[nodes[more]], ends[more])
        for slot, node, start, end in zip(*(column.tolist() for column in columns), strict=True):
            pages = slots.table[slot, start:end].copy()
            tokens = state.pool.pages.tokens[pages[0]]
            request = slots.samples[slot].request
            try:
                epoch = int(slots.cache_epoch[slot])
                slots.node[slot] = tree.extend(node, tokens, request.salt, pages, ready_step, epoch)
            except Exception as error:  # the pages stay its own
                state.queue.fail(request, error)

    def leave_behind(self) -> None:
        """Release the pages that the next plan, and later ones, do not read because of windows.

        The leader of a shared prompt keeps its pages for the samples that wait.
        """
        state, slots, tree = self._state, self._state.pool.slots, self._state.pool.tree
        if not state.pool.shape.window_tokens:
            return
        running = slots.running_slots()
        end = state.pool.shape.pages_left_behind(slots.scheduled[running])
        more = (slots.left_behind[running] < end) & (slots.lent_pages[running] == 0)
        moving, end = running[more], end[more]
        first, depth = slots.left_behind[moving], tree.depth[slots.node[moving]]
        slots.left_behind[moving] = end
        state.pool.pages.give(slots.entries(moving, np.maximum(first, depth), end))
        shared = first < depth
        columns = (moving[shared], first[shared], np.minimum(end, depth)[shared], (end >= depth)[shared])
        for slot, begin, stop, leaves in zip(*(column.tolist() for column in columns), strict=True):
            tree.leave_behind(int(slots.node[slot]), begin, stop)
            if leaves:
                slots.node[slot] = ROOT
