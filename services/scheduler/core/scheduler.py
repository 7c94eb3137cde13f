"""The core as its shell sees it: submit, cancel, plan, take results; attach and detach the worker."""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from services.common.errors import AlreadyExists, InvalidRequest, Overloaded, Unavailable
from services.scheduler.core.admission import Admission
from services.scheduler.core.deadlines import Deadlines
from services.scheduler.core.lifecycle import Ending, Lifecycle
from services.scheduler.core.load import Load, read_load
from services.scheduler.core.onboarding import Onboarding
from services.scheduler.core.outlook import steps_until_released
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import Plan, Result, Scored
from services.scheduler.core.planner import Planner
from services.scheduler.core.policy import Policy
from services.scheduler.core.prediction import Prediction
from services.scheduler.core.request import AdmissionMode, FinishReason, Request, Sample, WorkerShape
from services.scheduler.core.results import Results
from services.scheduler.core.state import State
from services.scheduler.core.yielding import Yielding

_SHORTEST_RETRY_S = 0.1
_WORKER_RETRY_S = 2.0  # while there is no worker, or it has nothing yet
_MOST_SETBACKS = 5  # lost workers without a token between them: then a sample may be what the worker dies of


class _Pending(NamedTuple):
    """A plan that the worker has not answered."""

    sampling: np.ndarray  # int64, slots that will sample
    queued: bool  # it went out while another was in flight


class Scheduler:
    """Owned and driven by one thread. Times come in as arguments: ``now_ns`` of a monotonic clock, ``now_ms`` since the
    epoch. A sink is the owner of a set of handles: a session, or one Generate call.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        vocab_size: int,
        policy: Policy | None = None,
        *,
        admission: type[Admission] = Admission,
    ) -> None:
        """``admission``: another rule than the forecast's, to compare with."""
        self.state = State(token_bytes, vocab_size, policy or Policy())
        self._lifecycle = Lifecycle(self.state)
        self._admission = admission
        self._deadlines = Deadlines()
        self._arrivals = count()
        self._sinks: dict[int, dict[int, Sample]] = {}
        self._pending: dict[int, _Pending] = {}  # by step, plans in flight
        self.step_s = 0.0  # recent time of a step, kept by the shell

    # -- the worker

    def attach(self, shape: WorkerShape) -> None:
        """A worker that holds nothing is there. Samples that cannot run on it end with an error."""
        state = self.state
        state.attach(shape)
        prediction = Prediction(state)
        onboarding = Onboarding(state, self._lifecycle, prediction, self._admission)
        yielding = Yielding(state, self._lifecycle, onboarding, self._admission)
        self._planner = Planner(state, self._lifecycle, onboarding, prediction, yielding)
        self._results = Results(state, self._lifecycle)
        for sample in list(state.waiting):
            if sample.request.limit > min(shape.max_context_tokens, shape.pool_tokens + 1):
                error = "the worker came back smaller than the one that accepted this request; send it again"
                self._lifecycle.finish([Ending(sample, FinishReason.ERROR, error=error)])

    def detach(self) -> None:
        """The worker is gone and its pages with it: running samples go back to the head of the queue, tokens kept."""
        state = self.state
        if not state.attached:
            return
        running = state.slots.running_samples()
        self._lifecycle.lose_worker()
        for sample in running:
            if sample.setbacks >= _MOST_SETBACKS:
                error = f"the worker was lost {sample.setbacks} times in a row while it computed this sequence"
                self._lifecycle.finish([Ending(sample, FinishReason.ERROR, error=error)])
        shape = state.shape
        state.attach(shape)  # an empty pool until the next worker says otherwise
        self._pending.clear()

    # -- requests

    def open_sink(self, sink: int) -> None:
        self._sinks[sink] = {}

    def close_sink(self, sink: int) -> None:
        """Nobody listens any more: all its samples end. Closing it again does nothing."""
        self._end(list(self._sinks.get(sink, {}).values()), FinishReason.CANCELLED)
        self._sinks.pop(sink, None)

    def live(self, sink: int) -> int:
        """Unfinished samples of a sink."""
        return len(self._sinks[sink])

    def submit(self, request: Request, now_ns: int) -> None:
        """Queue a request. After ``InvalidRequest``, ``AlreadyExists`` or ``Overloaded`` nothing happened."""
        state, handles = self.state, self._sinks.get(request.sink)
        if handles is None:
            raise Unavailable("the stream of this request is closed")
        try:
            self._check(request, handles)
            if request.automaton is not None:
                state.matcher.acquire(request.automaton)
        except (InvalidRequest, AlreadyExists, Overloaded):
            state.counters.requests_rejected += 1
            raise
        self._resolve(request)
        request.unfinished = request.n
        for offset in range(request.n):
            sample = Sample(request, offset, next(self._arrivals), now_ns)
            request.samples.append(sample)
            handles[sample.handle] = sample
            state.waiting.push(sample)
        state.requests[request.request_id] = request
        self._deadlines.add(request)
        state.counters.requests_accepted += 1
        state.counters.prompt_tokens += request.prompt_tokens

    def _resolve(self, request: Request) -> None:
        """What the core wants to know about an accepted request."""
        state, policy = self.state, self.state.policy
        default = AdmissionMode.GUARANTEED if request.priority in policy.guaranteed_classes else policy.mode
        # What is computed of a prompt must be heard of.
        scored = request.sampling.prompt_logprobs is not None
        request.guaranteed = scored or (request.mode or default) is AdmissionMode.GUARANTEED
        request.salt = request.cache_salt if policy.prefix_caching else (request.request_id, request.cache_salt)
        answer = request.limit - request.prompt_tokens
        request.length_class_id = state.lengths.class_of(request.length_class, answer)
        request.cost = -(-request.prompt_tokens // request.n) + state.lengths.expected(request.length_class_id, answer)

    def _check(self, request: Request, handles: dict[int, Sample]) -> None:
        shape = self.state.shape
        request.limit = resolve_limit(request, shape)
        if request.request_id in self.state.requests:
            raise AlreadyExists(f"request_id {request.request_id!r} names an unfinished request; choose another")
        wanted = range(request.handle, request.handle + request.n)
        taken = next((handle for handle in wanted if handle in handles), None)
        if taken is not None:
            raise AlreadyExists(f"handle {taken} belongs to an unfinished sample of this session; choose another")
        if request.n > self.state.policy.max_queued:
            raise InvalidRequest(
                f"n is {request.n} and the queue holds {self.state.policy.max_queued} sequences at most: lower n, or"
                " raise max_queued_sequences of the scheduler",
                field="n",
            )
        excess = len(self.state.waiting) + request.n - self.state.policy.max_queued
        if excess > 0:
            raise Overloaded(
                f"{len(self.state.waiting)} sequences wait and {request.n} more would pass max_queued_sequences="
                f"{self.state.policy.max_queued}; come back later, or raise it",
                retry_after_s=self.retry_after_s(excess),
            )

    def retry_after_s(self, places: int) -> float:
        """When the queue should be shorter by ``places``: as many sequences end by then as the forecast sees."""
        if not self.state.slots.running:
            return _WORKER_RETRY_S
        return max(_SHORTEST_RETRY_S, steps_until_released(self.state, places) * self.step_s)

    def cancel(self, sink: int, handles: Sequence[int]) -> None:
        """End samples early; unknown handles finished before and are passed over."""
        live = self._sinks.get(sink, {})
        self._end([live[handle] for handle in dict.fromkeys(handles) if handle in live], FinishReason.CANCELLED)

    def end_overdue(self, now_ms: int) -> None:
        """End what is past its deadline."""
        for request in self._deadlines.due(now_ms):
            self._end(request.samples, FinishReason.DEADLINE)

    def next_deadline_ms(self) -> int | None:
        return self._deadlines.next_ms()

    def _end(self, samples: Sequence[Sample], reason: FinishReason) -> None:
        """End those that have not finished since the last `take_output`; each comes once."""
        self._lifecycle.finish([Ending(sample, reason) for sample in samples if not sample.finished])

    # -- steps

    @property
    def plans_in_flight(self) -> int:
        return len(self._pending)

    def look_ahead(self, plans: int) -> None:
        """Let ``plans`` be in flight from now on, if that is safe.

        Forecasts count on everything being released so many plans behind its last one. More of them keep pages longer
        than those who were admitted were told; so only where all that runs has room at its longest.
        """
        more = plans - self.state.steps_ahead
        if more > 0 and self.state.attached:
            if not self._has_room_for_all():
                return
            self.state.slots.end_step[self.state.slots.running_slots()] += more
        self.state.steps_ahead = plans

    def _has_room_for_all(self) -> bool:
        slots, pool = self.state.slots, self.state.pool
        running = slots.running_slots()
        most = -(-(slots.limit[running] - 1) // pool.page_size)
        return pool.in_use + int(np.maximum(most - slots.page_count[running], 0).sum()) <= pool.size

    def plan(self, now_ns: int, *, hurry: bool = False) -> Plan | None:
        """The next plan, if another may be in flight and there is something to compute. ``hurry``: see `Planner`."""
        if len(self._pending) >= self.state.steps_ahead:
            return None
        plan = self._planner.build(now_ns, hurry=hurry)
        if plan is not None:
            slots = plan.sampling[0] if len(plan.sampling) == 1 else np.concatenate(plan.sampling)
            self._pending[plan.step] = _Pending(slots, bool(self._pending))
        return plan

    def take(self, result: Result, now_ns: int) -> None:
        """Take in the answer to the oldest plan in flight. ``ValueError`` when it answers something else."""
        expected, pending = next(iter(self._pending.items()), (None, None))
        if result.step != expected:
            raise ValueError(f"the worker answered step {result.step}, expected was {expected}")
        self._check_result(result)
        if not _answers(result, pending.sampling):
            raise ValueError(
                f"step {result.step}: {len(result.slots)} tokens and {len(result.failures)} failures, not for the"
                f" {len(pending.sampling)} slots that were to sample"
            )
        del self._pending[result.step]
        self.state.counters.device_busy_ns += result.device_ns
        if pending.queued:  # else there was nothing that the device could have done
            self.state.counters.device_idle_ns += result.idle_ns
        self._results.take(result, now_ns)

    def _check_result(self, result: Result) -> None:
        """Arrays that do not fit each other or the vocabulary would be taken for something else."""
        rows = len(result.slots)
        whole = len(result.tokens) == rows and len(result.logprobs) in (0, rows) and len(result.top_counts) in (0, rows)
        listed = int(result.top_counts.sum()) if len(result.top_counts) else 0
        whole = whole and len(result.top_token_ids) == listed and len(result.top_logprobs) == listed
        whole = whole and all(self._is_whole(slot, scored) for slot, scored in result.scored)
        if not whole or result.tokens.max(initial=0) >= self.state.shape.vocab_size:
            raise ValueError(f"step {result.step}: tokens that do not exist, or arrays of unequal length")

    def _is_whole(self, slot: int, scored: Scored) -> bool:
        count, listed = len(scored.logprobs), len(scored.top_token_ids)
        fits = slot < self.state.shape.max_slots and scored.start > 0 < count == len(scored.ranks)
        fits = fits and listed % count == 0 and listed == len(scored.top_logprobs)
        return bool(fits and scored.top_token_ids.max(initial=0) < self.state.shape.vocab_size)

    def take_output(self) -> list[tuple[int, Delta]]:
        """News since the last call, as (sink, delta). A finished sample's handle is free from here on."""
        news = self.state.outbox.take(self.state.step)
        for sink, delta in news:
            live = self._sinks.get(sink, {})
            for finish in delta.finished:
                live.pop(finish.handle, None)
        return news

    def load(self, *, ready: bool) -> Load:
        return read_load(self.state, ready=ready, plans_in_flight=self.plans_in_flight)


def _answers(result: Result, sampled: np.ndarray) -> bool:
    """Whether ``result`` has a token or a failure for each of the slots ``sampled``, int64, and nothing else."""
    if not result.failures and np.array_equal(result.slots, sampled):  # the usual order
        return True
    failed = np.array([slot for slot, _ in result.failures], np.int64)
    return np.array_equal(np.sort(np.concatenate((result.slots, failed))), np.sort(sampled))


def resolve_limit(request: Request, shape: WorkerShape) -> int:
    """The length at which samples of ``request`` end. ``InvalidRequest`` when the worker can never run them."""
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
        return min(context, pool + 1)  # the last token of an answer is sampled, never computed
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
