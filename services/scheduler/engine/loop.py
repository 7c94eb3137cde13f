"""The step loop: one thread that owns the core and runs it whenever an event arrives."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import structlog

from services.common.boundaries import errors_to
from services.common.errors import TokaError
from services.common.plan.codec import decode_limits, encode_plan
from services.common.plan.result_rules import BrokenResult
from services.common.plan.types import WorkerLimits
from services.scheduler.core.future.admission import PageForecast, forecast_pages
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.request import PauseMode, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.events import Action, Events, PlanEvent, Rejected
from services.scheduler.engine.inbox import Call, Inbox
from services.scheduler.engine.load import read_load
from services.scheduler.engine.pauses import Pause, Pauses
from services.scheduler.engine.planning import Planning
from services.scheduler.engine.planning_timeout import PlanningTimeout
from services.scheduler.engine.stats import Stats
from services.scheduler.engine.statsd import Statsd
from services.scheduler.engine.step_timeout import StepTimeout
from services.scheduler.engine.submission import log_failures, submit_request
from services.scheduler.record.recorder import Recorder
from services.scheduler.workers.stream import ReceivedResult, WorkerStream
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.scheduler.v1 import observe_pb2, session_pb2
from tokasaurus.worker.v1 import worker_pb2

log = structlog.get_logger(__name__)

T = TypeVar("T")


class EngineLoop:
    """Thread of the step loop. Other threads call it through ``post`` and ``ask``.

    ``deliver`` gets its events once for each iteration. ``deliver`` and ``failed`` are called on the loop's thread and
    must not block.
    """

    def __init__(
        self,
        core: Scheduler,
        max_context_tokens: int,
        deliver: Callable[[Events], None],
        failed: Callable[[BaseException], object],
        *,
        step_deadline_s: float = 30.0,
        stats_report_seconds: float = 0.0,
        recorder: Recorder | None = None,
        statsd: Statsd | None = None,
    ) -> None:
        """Create the loop without starting it.

        ``step_deadline_s`` is the time after which a worker without a result is disconnected, and a core without a plan
        fails.
        """
        self._core = core
        self._max_context_tokens = max_context_tokens
        self._deliver = deliver
        self._failed = failed
        self._recorder = recorder
        self._inbox = Inbox()
        self._stream: WorkerStream | None = None
        self._events: Events = []
        self._stopping = False
        self._draining = False  # new requests are refused
        self._pauses = Pauses()
        # Reasons while no worker is connected: for the end of the last connection, and for the lack of a new one.
        self._lost, self._missing = "its worker does not answer yet", ""
        self._step_timeout = StepTimeout(step_deadline_s)
        self._planning_timeout = PlanningTimeout(step_deadline_s)
        self._stats = Stats(stats_report_seconds, time.monotonic(), statsd)
        self._counters = core.state.queue.counters
        self._lap_began_ns = time.perf_counter_ns()
        self._forecast: PageForecast = ()
        self._planning = Planning(core)
        self.watchers = 0  # number of plan watchers, set by the API
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    # -- from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current iteration."""
        self.post(self._stop)
        self._thread.join()

    def post(self, call: Call) -> None:
        """Run ``call`` on the loop's thread, before any queued request of a client."""
        self._inbox.put(call)

    def ask(self, call: Callable[[Scheduler], T], *, after_requests: bool = False) -> Future[T]:
        """Run ``call(core)`` on the loop's thread. Return the future of its result.

        With ``after_requests``, it runs after all requests that were submitted before.
        """
        return self._inbox.ask(lambda: call(self._core), after_requests=after_requests)

    def submit(self, request: Request, *, aborted: bool = False) -> None:
        """Queue ``request``. The first event of the request is Accepted or Rejected. If ``aborted``, it then ends."""
        self._inbox.put_request(lambda: self._submit(request), request.n)
        if aborted:
            self.act_on(request.sink, list(range(request.handle, request.handle + request.n)), Scheduler.end)

    def reject(self, sink: int, handle: int, error: TokaError) -> None:
        """Send Rejected for a request that was not submitted, in order with the sink's other events."""
        self._inbox.put_request(lambda: self._reject(sink, handle, error))

    def act_on(self, sink: int, handles: list[int], action: Action) -> None:
        """Run ``action`` for the samples of ``handles``, after all earlier submits of the sink."""
        self._inbox.put_request(lambda: action(self._core, sink, handles))

    def heartbeat(self, sink: int, nonce: int) -> None:
        self._inbox.put_request(lambda: self._events.append((sink, session_pb2.Heartbeat(nonce=nonce))))

    @property
    def backlog(self) -> int:
        """The number of requests that the loop has not processed."""
        return self._inbox.requests

    def worker_connected(self, stream: WorkerStream) -> None:
        self.post(lambda: self._attach(stream))

    def worker_result(self, stream: WorkerStream, received: ReceivedResult) -> None:
        self.post(lambda: self._take_result(stream, received))

    def worker_lost(self, stream: WorkerStream, reason: str, *, stopping: bool = False) -> None:
        self.post(lambda: self._detach(stream, reason, stopping=stopping))

    def worker_missing(self, reason: str) -> None:
        self.post(lambda: self._miss(reason))

    def pause(self, mode: PauseMode, *, recompute: bool = False, join: bool = False) -> Future[Pause]:
        """Pause the core after all requests that were submitted before. The future completes when the pause has begun.

        With ``join``, a pause that was requested before is left as it is. The future fails with ``FailedPrecondition``
        if the core is resumed before.
        """
        began: Future[Pause] = Future()
        request = partial(self._pauses.request, self._core, mode, recompute=recompute, join=join, began=began)
        self._inbox.put_request(request)
        return began

    def resume(self, number: int | None = None) -> Future[float | None]:
        """Call ``Pauses.resume`` after all earlier pauses."""
        return self.ask(lambda core: self._pauses.resume(core, number), after_requests=True)

    def change_weights(self, weights: weights_pb2.Weights) -> Future[None]:
        """Set the weights that the worker uses from the next plan on. The core must be paused."""

        def change(core: Scheduler) -> None:
            core.change_weights(weights.version)
            if self._recorder is not None:
                self._recorder.weights_changed(weights)

        return self.ask(change)

    def drain(self) -> None:
        """Refuse new requests with ``DRAINING`` from now on. Accepted requests continue."""
        self.post(self._drain)

    def limits_of(self, info: worker_pb2.WorkerInfo) -> WorkerLimits:
        """Return the worker's limits. The context is the smaller one of the model and the worker."""
        limits = decode_limits(info)
        return replace(limits, max_context_tokens=min(limits.max_context_tokens, self._max_context_tokens))

    # -- on the loop's thread

    def _run(self) -> None:
        with errors_to(self._fail, BaseException):
            while not self._stopping:
                self._stats.changed |= self._inbox.run_once(self._until_due(), lambda: self._worker_waits)
                self._core.end_overdue(time.monotonic_ns() // 1_000_000)
                self._abandon_overdue_worker()
                waited_ns = self._inbox.take_waited_ns()
                self._counters.loop_wait_ns += waited_ns
                self._counters.loop_take_ns += self._lap_ns() - waited_ns
                self._send_plans()
                self._planning_timeout.check(self._core, time.monotonic(), connected=self.connected)
                self._pauses.complete(self._core)
                self._report()
                self._counters.loop_report_ns += self._lap_ns()
                self._deliver_events()
                self._counters.loop_deliver_ns += self._lap_ns()

    def _lap_ns(self) -> int:
        """Return the time since the last call."""
        began_ns, self._lap_began_ns = self._lap_began_ns, time.perf_counter_ns()
        return self._lap_began_ns - began_ns

    def _fail(self, error: BaseException) -> None:
        log.error("the step loop failed", exc_info=error)
        self._failed(error)

    @property
    def _worker_waits(self) -> bool:
        """True if another plan may be sent now."""
        return self._stream is not None and self._planning.is_due

    def _until_due(self) -> float | None:
        """Return the seconds until the next deadline, report, log line or timeout, or None without one."""
        due = []
        if (deadline_ms := self._core.deadlines.next_ms()) is not None:
            due.append(deadline_ms / 1000 - time.monotonic())
        if self._stream is not None and self._core.plans_in_flight:
            due.append(self._step_timeout.until_check())
        if (check_s := self._planning_timeout.until_check()) is not None:
            due.append(check_s)
        if self._stream is not None and (due_at := self._planning.due_at):
            due.append(due_at - time.monotonic())
        if (report_at := self._stats.due(busy=self._busy())) is not None:
            due.append(report_at - time.monotonic())
        return min(max(0.0, min(due)), 3600.0) if due else None

    def _send_plans(self) -> None:
        """Send plans until the worker needs none now."""
        if self._stream is None:
            return
        self._planning.adjust()
        while plans := self._planning.build():
            self._counters.loop_plan_ns += self._lap_ns()
            for plan, following in zip_longest(plans, plans[1:]):
                self._send(self._stream, plan, with_next=following is not None and not following.prefill_tokens)
            self._planning.sent(plans)
            self._counters.loop_send_ns += self._lap_ns()
        self._counters.loop_plan_ns += self._lap_ns()

    def _send(self, stream: WorkerStream, plan: PlannedStep, *, with_next: bool) -> None:
        """Send ``plan``. ``with_next``: its result may be returned with that of the next plan."""
        message = encode_plan(plan)
        message.result_with_next = with_next
        stream.send(message)
        if self._recorder is not None:
            self._recorder.plan(message, plan.admitted_ids, plan.released_ids)
        if self._core.plans_in_flight == 1:
            self._step_timeout.restart(time.monotonic())
        if self.watchers:
            state, in_flight = self._core.state, self._core.plans_in_flight
            event = PlanEvent(plan, len(state.queue.waiting), state.pool.pages.in_use, in_flight)
            self._events.append((None, event))

    def _deliver_events(self) -> None:
        log_failures(self._core)
        self._events.extend(self._core.take_output())
        if self._events:
            self._deliver(self._events)
            self._events = []

    def _take_result(self, stream: WorkerStream, received: ReceivedResult) -> None:
        if stream is not self._stream:
            return
        if self._recorder is not None:
            self._recorder.result(received.message)
        self._step_timeout.restart(time.monotonic())
        try:
            self._core.take(received.result, time.monotonic_ns())
        except BrokenResult as error:  # it violates the contract, so only a new connection helps
            log.error("the worker sent an invalid result", reason=str(error))
            self._abandon(stream, str(error))
            return
        self._planning.result_received(received)
        # The step's output is collected before the next result, so that there is one message for each step.
        self._events.extend(self._core.take_output())

    def _attach(self, stream: WorkerStream) -> None:
        if self._stream is not None:
            self._detach(self._stream, "a new stream began")
        core = self._core
        self._planning.begin(stream)
        core.attach(self.limits_of(stream.info), asleep=stream.is_asleep())
        if stream.weights_version != core.state.queue.weights_version:
            core.change_weights(stream.weights_version)
        self._stream = stream
        if self._recorder is not None:
            self._recorder.connected(stream.info, stream.plans_in_flight)

    def _detach(self, stream: WorkerStream, reason: str, *, stopping: bool = False) -> None:
        """Detach the worker of ``stream`` from the core. ``stopping`` means that the scheduler ended the stream."""
        if stream is not self._stream:
            return
        self._stream = None
        self._lost, self._missing = reason, ""
        self._core.detach()
        if self._recorder is not None:
            self._recorder.disconnected(reason)
        self._counters.worker_restarts += 1
        facts = {"waiting": len(self._core.state.queue.waiting), "suspects": self._core.quarantine.suspects}
        (log.info if stopping else log.warning)("worker lost", reason=reason, **facts)

    def _abandon(self, stream: WorkerStream, reason: str) -> None:
        """End a connection that cannot be used. The link opens a new one."""
        stream.end()
        self._detach(stream, reason)

    def _abandon_overdue_worker(self) -> None:
        stream, step = self._stream, self._core.oldest_step
        if stream is not None and step is not None and self._step_timeout.check(time.monotonic()):
            waited = f"{self._step_timeout.seconds:.0f} s (flag step_deadline)"
            self._abandon(stream, f"worker {stream.overdue_ranks()} has returned no result of plan {step} for {waited}")

    def _submit(self, request: Request) -> None:
        self._events.append((request.sink, submit_request(self._core, request, draining=self._draining)))

    def _reject(self, sink: int, handle: int, error: TokaError) -> None:
        self._counters.requests_rejected += 1
        self._events.append((sink, Rejected(handle, error)))

    # -- state for other components

    @property
    def not_ready_reason(self) -> str:
        """The reason, or an empty string if it is ready. Use this and the following on the loop's thread."""
        if self._draining:
            return "draining"
        if self._stream is None:
            return f"{self._lost}; now: {self._missing}" if self._missing else self._lost
        return self._core.quarantine.unreliable_reason or self._planning_timeout.reason

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def connected(self) -> bool:
        """True if a worker is connected. A worker that does not respond is disconnected."""
        return self._stream is not None

    def load(self) -> observe_pb2.Load:
        core = self._core
        if bool(self._forecast) != core.state.attached:  # the worker has connected or disconnected
            self._forecast = forecast_pages(core.state)
        return read_load(
            core.state,
            not_ready_reason=self.not_ready_reason,
            plans_in_flight=core.plans_in_flight,
            step_s=core.step_s,
            forecast=self._forecast,
        )

    def _busy(self) -> bool:
        return bool(
            self._core.state.attached and (self._core.state.pool.slots.running or self._core.state.queue.waiting)
        )

    def _report(self) -> None:
        now = time.monotonic()
        if self._stats.load_is_due(now):
            state = self._core.state
            if self._stats.forecast_is_due(now, running=state.attached and state.pool.slots.running > 0):
                self._forecast = forecast_pages(state)
            self._events.append((None, self.load()))
        if self._stats.line_is_due(now) and self._busy():
            self._stats.log(self.load(), now, self._core.step_s, self._core.state.queue.steps_ahead)
        if (statsd := self._stats.due_statsd(now)) is not None:
            statsd.send(self.load())

    def _miss(self, reason: str) -> None:
        """Note why the link cannot connect."""
        if reason != self._lost:
            self._missing = reason

    def _drain(self) -> None:
        self._draining = True

    def _stop(self) -> None:
        self._stopping = True
