"""A sample enters a slot, leaves it, or is interrupted: the Python that runs once for each sequence."""

import numpy as np

from services.scheduler.core.pages import FAR
from services.scheduler.core.request import Finish, FinishReason, PromptShare, Request, Sample
from services.scheduler.core.state import State


class Lifecycle:
    """Keeps slots, pages, tree and queue consistent with each other. Owned by the core."""

    def __init__(self, state: State) -> None:
        self._state = state

    def enter(self, sample: Sample, cached: int, pages: np.ndarray, end: int, step: int, now_ns: int) -> int:
        """Put a waiting sample, with its page table so far (held already), into a free slot; returns the slot."""
        state, slots, request = self._state, self._state.slots, sample.request
        state.waiting.remove(sample)
        slot = sample.slot = slots.take()
        tokens = sample.tokens
        slots.samples[slot] = sample
        slots.active[slot] = True
        slots.admitted_step[slot] = step
        slots.given[slot] = slots.known[slot] = len(tokens)
        slots.scheduled[slot] = cached
        slots.limit[slot] = request.limit
        slots.min_known[slot] = request.prompt_tokens + request.min_tokens
        slots.end_step[slot] = end
        slots.page_count[slot] = len(pages)
        slots.table[slot, : len(pages)] = pages
        slots.last_token[slot] = tokens[-1]
        base = -1 if request.automaton is None else state.matcher.base(request.automaton) + sample.stop_state
        slots.stop_state[slot] = base
        slots.stop_set[slot] = state.stop_tokens.acquire(request.stop_token_ids)
        slots.sink[slot], slots.handle[slot] = request.sink, sample.handle
        slots.first_token_ns[slot], slots.last_token_ns[slot] = sample.first_token_ns, sample.last_token_ns
        slots.registered_pages[slot] = cached // state.shape.page_size
        self._count_cached(sample, cached)
        sample.first_plan_ns = sample.first_plan_ns or now_ns
        return slot

    def _count_cached(self, sample: Sample, cached: int) -> None:
        counters = self._state.counters
        if sample.cached_tokens < 0:
            sample.cached_tokens = min(cached, sample.request.prompt_tokens)
            counters.cached_prompt_tokens += sample.cached_tokens
        counters.recomputed_tokens += max(0, min(sample.computed_before, sample.given) - cached)

    def begin_share(self, leader: Sample, pages: np.ndarray) -> None:
        """Hold the prompt's pages for the leader's waiting siblings; they may be used when ``share_ready`` says so."""
        self._state.pool.hold(pages, FAR)
        self._state.sharing[leader.request] = pages
        leader.request.share = PromptShare(leader, pages=pages)

    def share_ready(self, leader: Sample, step: int) -> None:
        """The plan ``step`` computes the last of the prompt."""
        share = leader.request.share
        if share is not None and share.leader is leader and not share.ready_step:
            share.ready_step = step + 1

    def end_share(self, request: Request) -> None:
        """Let go of the prompt's pages: nobody waits for them, or they are needed elsewhere."""
        pages = self._state.sharing.pop(request, None)
        request.share = None
        if pages is not None:
            self._state.pool.drop(pages, FAR)

    def finish(
        self,
        sample: Sample,
        reason: FinishReason,
        *,
        stop_token_id: int | None = None,
        stop_string: tuple[int, int] | None = None,
        error: str = "",
    ) -> None:
        """End a sample, wherever it is, and tell its sink."""
        state, request = self._state, sample.request
        if sample.slot >= 0:
            completion = int(state.slots.known[sample.slot]) - request.prompt_tokens
            self._leave(sample, keep_pages=reason is not FinishReason.ERROR)
        else:
            completion = sample.given - request.prompt_tokens
            state.waiting.remove(sample)
        sample.finished = True
        request.unfinished -= 1
        if request.share is not None and (
            not request.waiting or (request.share.leader is sample and not request.share.ready_step)
        ):
            self.end_share(request)
        if not request.unfinished:
            state.requests.pop(request.request_id, None)
            if request.automaton is not None:
                state.matcher.release(request.automaton)
        state.counters.sequences_finished += 1
        state.counters.sequences_cancelled += reason is FinishReason.CANCELLED
        started, first, last = sample.first_plan_ns, sample.first_token_ns, sample.last_token_ns
        finish = Finish(
            handle=sample.handle,
            reason=reason,
            prompt_tokens=request.prompt_tokens,
            completion_tokens=completion,
            cached_prompt_tokens=max(0, sample.cached_tokens),
            queued_ns=max(0, started - sample.accepted_ns),
            prefill_ns=max(0, first - started) if first else 0,
            decode_ns=last - first,
            stop_token_id=stop_token_id,
            stop_string=stop_string,
            error=error,
        )
        state.outbox.finish(request.sink, finish)

    def interrupt(self, sample: Sample) -> None:
        """Take a running sample back to the head of its class, its tokens kept; its pages are gone with the worker."""
        state, slots, slot, request = self._state, self._state.slots, sample.slot, sample.request
        sample.generated = self._generated(slot, len(request.tokens))
        sample.computed_before = int(slots.scheduled[slot])
        sample.setbacks = 0 if slots.known[slot] > slots.given[slot] else sample.setbacks + 1
        if request.automaton is not None:
            sample.stop_state = int(slots.stop_state[slot]) - state.matcher.base(request.automaton)
        sample.first_token_ns, sample.last_token_ns = int(slots.first_token_ns[slot]), int(slots.last_token_ns[slot])
        state.stop_tokens.release(request.stop_token_ids)
        slots.active[slot] = False
        sample.slot = -1
        request.share = None
        state.waiting.push_front(sample)

    def _generated(self, slot: int, start: int) -> np.ndarray:
        """Known tokens of a slot from position ``start`` on."""
        slots, pool = self._state.slots, self._state.pool
        known = int(slots.known[slot])
        tokens = pool.tokens[slots.pages(slot)].reshape(-1)[:known]
        if known > len(tokens):  # the newest token has no page yet
            tokens = np.append(tokens, slots.last_token[slot])
        return tokens[start:].astype(np.uint32)

    def _leave(self, sample: Sample, keep_pages: bool) -> None:
        state, slots, slot = self._state, self._state.slots, sample.slot
        pages = slots.pages(slot).copy()
        if slot in state.prefilling:
            state.prefilling.remove(slot)
        if not keep_pages:
            state.tree.forget(pages)
        elif state.prefix_caching:
            computed = min(int(slots.known[slot]), int(slots.scheduled[slot]))
            self.register_pages(slot, computed, ready_step=state.step + 1)
        state.pool.drop(pages, int(slots.end_step[slot]))
        state.stop_tokens.release(sample.request.stop_token_ids)
        sample.first_token_ns, sample.last_token_ns = int(slots.first_token_ns[slot]), int(slots.last_token_ns[slot])
        slots.give(slot)
        sample.slot = -1
        state.to_release.append((slot, sample.request.request_id))

    def register_pages(self, slot: int, length: int, ready_step: int) -> None:
        """Make the pages that lie within the first ``length`` tokens findable for plans from ``ready_step`` on."""
        state, slots = self._state, self._state.slots
        first, end = int(slots.registered_pages[slot]), length // state.shape.page_size
        pages = slots.pages(slot)
        # A page that another sequence registered first ends the run: what is behind it would hang from a stranger.
        if first >= end or (first and not state.pool.registered[pages[first - 1]]):
            return
        tokens = state.pool.tokens[pages[:end]].reshape(-1)
        salt = slots.samples[slot].request.cache_salt
        slots.registered_pages[slot] = state.tree.register(tokens, salt, pages, first, end, ready_step)
