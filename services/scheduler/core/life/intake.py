"""Puts requests into the queue, or rejects them."""

import numpy as np

from services.common.boundaries import undo_on_error
from services.common.errors import AlreadyExists, InvalidRequest, Overloaded
from services.common.plan.types import SamplingSettings, WorkerLimits
from services.scheduler.core.future.estimate import steps_until_released
from services.scheduler.core.queue.deadlines import Deadlines
from services.scheduler.core.request import AdmissionMode, Priority, Request, Sample
from services.scheduler.core.state import State

CANARY_ID = ""  # never the id of a client's request
_SHORTEST_RETRY_S = 0.1
_WORKER_RETRY_S = 2.0  # if no sequence runs


class Intake:
    """Checks requests and adds their samples to the queue. Owned by the core."""

    def __init__(self, state: State, deadlines: Deadlines) -> None:
        self._state = state
        self._deadlines = deadlines
        self.arrivals = 0  # samples so far

    def submit(self, request: Request, handles: dict[int, Sample], now_ns: int, step_s: float) -> None:
        """Queue ``request``, and add its samples to ``handles``, the unfinished samples of its sink.

        ``step_s`` is the recent duration of a step. If this raises, nothing has changed. Raises ``InvalidRequest``,
        ``AlreadyExists`` or ``Overloaded`` if the request is rejected.
        """
        state = self._state
        try:
            self._check(request, handles, step_s)
            if request.automaton is not None:
                state.queue.matcher.acquire(request.automaton)
        except (InvalidRequest, AlreadyExists, Overloaded):
            state.queue.counters.requests_rejected += 1
            raise
        with undo_on_error(self._undo_enqueue, request, handles):
            self._enqueue(request, handles, now_ns)
        state.queue.counters.requests_accepted += 1
        state.queue.counters.prompt_tokens += request.prompt_tokens

    def canary(self) -> Sample:
        """Queue a sample of no client, with a prompt and an answer of one token. It has no sink for its output."""
        request = Request(CANARY_ID, np.zeros(1, np.uint32), SamplingSettings(), max_tokens=1, priority=Priority.HIGH)
        request.limit = resolve_limit(request, self._state.pool.shape)
        self._resolve(request)
        request.unfinished = 1
        sample = Sample(request, 0, self._arrive(), 0)
        request.samples.append(sample)
        self._state.queue.waiting.push(sample)
        return sample

    def retry_after_s(self, count: int, step_s: float) -> float:
        """Return the seconds after which ``count`` running sequences will have ended, by the forecast."""
        if not self._state.pool.slots.running:
            return _WORKER_RETRY_S
        return max(_SHORTEST_RETRY_S, steps_until_released(self._state, count) * step_s)

    def _enqueue(self, request: Request, handles: dict[int, Sample], now_ns: int) -> None:
        state = self._state
        self._resolve(request)
        request.unfinished = request.n
        for offset in range(request.n):
            sample = Sample(request, offset, self._arrive(), now_ns)
            request.samples.append(sample)
            handles[sample.handle] = sample
            state.queue.waiting.push(sample)
        state.queue.requests[request.request_id] = request
        self._deadlines.add(request)

    def _arrive(self) -> int:
        """Return the number of the next sample, in order of arrival."""
        self.arrivals += 1
        return self.arrivals - 1

    def _undo_enqueue(self, request: Request, handles: dict[int, Sample]) -> None:
        """Remove a request that was queued in part."""
        state, request.unfinished = self._state, 0
        state.queue.requests.pop(request.request_id, None)
        for sample in request.samples:
            handles.pop(sample.handle, None)
            if sample in state.queue.waiting:
                state.queue.waiting.remove(sample)
        request.samples.clear()
        if request.automaton is not None:
            state.queue.matcher.release(request.automaton)

    def _resolve(self, request: Request) -> None:
        """Set the fields of an accepted request that only the core uses."""
        state, policy = self._state, self._state.policy
        default = AdmissionMode.GUARANTEED if request.priority in policy.guaranteed_classes else policy.mode
        # A request for log-probabilities of the prompt is never preempted, as cached tokens have none.
        scored = request.sampling.prompt_logprobs is not None
        request.scored = max(0, request.sampling.prompt_logprobs_start - 1)
        request.guaranteed = scored or (request.mode or default) is AdmissionMode.GUARANTEED
        request.salt = request.cache_salt if policy.prefix_caching else (request.request_id, request.cache_salt)
        answer = request.limit - request.prompt_tokens
        request.length_class_id = state.queue.lengths.class_of(request.length_class, answer)
        request.cost = -(-request.prompt_tokens // request.n) + state.queue.lengths.expected(
            request.length_class_id, answer
        )

    def _check(self, request: Request, handles: dict[int, Sample], step_s: float) -> None:
        waiting, most = len(self._state.queue.waiting), self._state.policy.max_queued
        request.limit = resolve_limit(request, self._state.pool.shape)
        if request.request_id in self._state.queue.requests:
            raise AlreadyExists(f"request_id {request.request_id!r} names an unfinished request; choose another")
        wanted = range(request.handle, request.handle + request.n)
        taken = next((handle for handle in wanted if handle in handles), None)
        if taken is not None:
            raise AlreadyExists(f"handle {taken} belongs to an unfinished sample of this session; choose another")
        if request.n > most:
            raise InvalidRequest(
                f"n is {request.n} and the queue holds {most} sequences at most: lower n, or raise"
                " max_queued_sequences of the scheduler",
                field="n",
            )
        excess = waiting + request.n - most
        if excess > 0:
            raise Overloaded(
                f"{waiting} sequences wait and {request.n} more would pass max_queued_sequences={most}; retry"
                " later, or raise it",
                retry_after_s=self.retry_after_s(excess, step_s),
            )


def resolve_limit(request: Request, shape: WorkerLimits) -> int:
    """Return the greatest length of samples of ``request``.

    Raises ``InvalidRequest`` if a worker of this shape can never run them.
    """
    prompt, context, pool = request.prompt_tokens, shape.max_context_tokens, shape.pool_tokens
    if len(request.tokens) >= context:
        raise InvalidRequest(
            f"the prompt has {len(request.tokens)} tokens and the model's context is {context}: at least one token must"
            " be left for the answer; shorten the prompt",
            field="prompt",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    if len(request.tokens) > pool:
        raise InvalidRequest(
            f"the prompt has {len(request.tokens)} tokens and the KV cache holds {pool}: shorten the prompt, or raise"
            " kv_cache_num_tokens of the worker",
            field="prompt",
            reason="KV_CACHE_TOO_SMALL",
        )
    if request.max_tokens is None:
        return min(context, pool + 1)  # the last token of an answer is sampled and never computed
    limit = prompt + request.max_tokens
    if limit > context:
        raise InvalidRequest(
            f"prompt and answer would have {limit} tokens ({prompt} in the prompt, max_tokens={request.max_tokens}) and"
            f" the model's context is {context}; lower max_tokens to {context - prompt} or shorten the prompt",
            field="stopping.max_tokens",
            reason="CONTEXT_LENGTH_EXCEEDED",
        )
    if limit - 1 > pool:
        raise InvalidRequest(
            f"prompt and answer would have {limit} tokens ({prompt} in the prompt, max_tokens={request.max_tokens}) and"
            f" the KV cache holds {pool}: lower max_tokens, or raise kv_cache_num_tokens of the worker",
            field="stopping.max_tokens",
            reason="KV_CACHE_TOO_SMALL",
        )
    return limit
