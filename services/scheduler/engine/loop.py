"""The step loop: one OS thread that owns the core and turns whenever something happened."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import structlog

from services.common.errors import TokaError
from services.common.plan.codec import encode_plan
from services.scheduler.core.future.summary import PageForecast, forecast_pages
from services.scheduler.core.plan import PlannedStep, WrongAnswer
from services.scheduler.core.request import Request, WorkerShape
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.step.load import Load
from services.scheduler.engine.inbox import Call, Inbox
from services.scheduler.engine.news import HeartbeatAnswer, News, PlanNews, Rejected
from services.scheduler.engine.pace import Pace
from services.scheduler.engine.readiness import Readiness
from services.scheduler.engine.reception import log_failures, take_in
from services.scheduler.engine.silence import Silence
from services.scheduler.engine.stages import Stages
from services.scheduler.engine.stall import Stall
from services.scheduler.engine.stats import Stats
from services.scheduler.engine.statsd import Statsd
from services.scheduler.record.recorder import Recorder
from services.scheduler.workers.codec import decode_shape
from services.scheduler.workers.stream import Answer, WorkerStream
from tokasaurus.worker.v1 import worker_pb2

log = structlog.get_logger(__name__)

Asked = TypeVar("Asked")

_SHARED_S = 600.0  # plans are sent late for so long after requests of two keys were there together


class EngineLoop:
    """Other threads talk to it through ``post`` and ``ask``; what it says goes to ``deliver``, once for each turn.

    ``deliver`` and ``failed`` are called on the loop's thread and must only pass things on.
    """

    def __init__(
        self,
        core: Scheduler,
        max_context_tokens: int,
        deliver: Callable[[News], None],
        failed: Callable[[BaseException], object],
        *,
        step_deadline_s: float = 30.0,
        stats_report_seconds: float = 0.0,
        recorder: Recorder | None = None,
        statsd: Statsd | None = None,
    ) -> None:
        """``step_deadline_s``: a worker that owes an answer for so long is given up, and so is a core that owes a
        plan."""
        self._core = core
        self._max_context_tokens = max_context_tokens
        self._deliver = deliver
        self._failed = failed
        self._recorder = recorder
        self._inbox = Inbox()
        self._stream: WorkerStream | None = None
        self._news: News = []
        self._stopping = False
        self._readiness = Readiness()
        self._silence = Silence(step_deadline_s)
        self._stall = Stall(step_deadline_s)
        self._stats = Stats(stats_report_seconds, time.monotonic(), statsd)
        self._stages = Stages(core.state.queue.counters)
        self._forecast: PageForecast = ()
        self._pace = Pace()
        self._ahead = (1, 1)  # plans in flight: at least, at most
        self._shared_until = 0.0  # keys shared the worker a while ago: plans are sent late, so that requests are early
        self._send_at = 0.0  # the next plan is held back until then
        self.watchers = 0  # set by the API: plans are reported while it is not 0
        self._thread = threading.Thread(target=self._run, name="step-loop", daemon=True)

    # -- from any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the present turn."""
        self.post(self._stop)
        self._thread.join()

    def post(self, event: Call) -> None:
        """Run ``event`` on the loop's thread, before any request of a client that waits."""
        self._inbox.put(event)

    def ask(self, question: Callable[[Scheduler], Asked]) -> Future[Asked]:
        """``question(core)``, answered on the loop's thread."""
        return self._inbox.ask(lambda: question(self._core))

    def submit(self, request: Request) -> None:
        """Queue ``request``; its sink is told Accepted or Rejected before anything else about it."""
        self._inbox.put_request(lambda: self._submit(request), request.n)

    def reject(self, sink: int, handle: int, error: TokaError) -> None:
        """Tell a sink that its request never got here, in order with everything else it is told."""
        self._inbox.put_request(lambda: self._reject(sink, handle, error))

    def cancel(self, sink: int, handles: list[int]) -> None:
        """Behind all that the sink submitted before."""
        self._inbox.put_request(lambda: self._core.cancel(sink, handles))

    def heartbeat(self, sink: int, nonce: int) -> None:
        self._inbox.put_request(lambda: self._news.append((sink, HeartbeatAnswer(nonce))))

    @property
    def backlog(self) -> int:
        """Requests that the loop has not looked at."""
        return self._inbox.requests

    def worker_connected(self, stream: WorkerStream) -> None:
        self.post(lambda: self._attach(stream))

    def worker_answered(self, stream: WorkerStream, answer: Answer) -> None:
        self.post(lambda: self._take_result(stream, answer))

    def worker_lost(self, stream: WorkerStream, reason: str, *, stopping: bool = False) -> None:
        self.post(lambda: self._detach(stream, reason, stopping=stopping))

    def worker_missing(self, reason: str) -> None:
        self.post(lambda: self._readiness.miss(reason))

    def drain(self) -> None:
        """From here on new requests are refused with ``DRAINING``; those that are there go on."""
        self.post(self._readiness.drain)

    def shape_of(self, info: worker_pb2.WorkerInfo) -> WorkerShape:
        return decode_shape(info, self._max_context_tokens)

    # -- on the loop's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._stats.changed |= self._inbox.turn(self._until_due(), lambda: self._worker_waits)
                self._core.end_overdue(time.monotonic_ns() // 1_000_000)
                self._abandon_silent_worker()
                self._stages.taken(self._inbox.take_waited_ns())
                self._send_plans()
                self._stall.look(self._core, time.monotonic(), connected=self.connected)
                self._report()
                self._stages.reported()
                self._hand_over()
                self._stages.delivered()
        except BaseException as error:
            log.error("the step loop failed", exc_info=error)
            self._failed(error)

    @property
    def _worker_waits(self) -> bool:
        """Whether another plan may be sent now, if there is something to compute."""
        if self._stream is None or self._core.plans_in_flight >= self._core.state.queue.steps_ahead:
            return False
        return self._send_at <= time.monotonic()

    def _until_due(self) -> float | None:
        """Seconds until a deadline, a load report, a log line or the end of patience; None when only an event can bring
        news."""
        due = []
        if (deadline_ms := self._core.next_deadline_ms()) is not None:
            due.append(deadline_ms / 1000 - time.monotonic())
        if self._stream is not None and self._core.plans_in_flight:
            due.append(self._silence.until_look())
        if (look_s := self._stall.until_look()) is not None:
            due.append(look_s)
        if self._send_at and self._stream is not None:
            due.append(self._send_at - time.monotonic())
        if (telling := self._stats.due(busy=self._busy())) is not None:
            due.append(telling - time.monotonic())
        return min(max(0.0, min(due)), 3600.0) if due else None

    def _send_plans(self) -> None:
        """Keep the worker's queue full."""
        core, state, pace = self._core, self._core.state, self._pace
        self._send_at = 0.0
        if self._stream is not None:
            state.queue.step_cost = pace.times.step_cost or state.queue.step_cost
            ahead = pace.plans_ahead(state.queue.steps_ahead, *self._ahead)
            if ahead != state.queue.steps_ahead:
                core.set_steps_ahead(ahead)
        while self._stream is not None:
            begun, waiting = time.monotonic(), bool(state.queue.waiting)
            if core.plans_in_flight < state.queue.steps_ahead and (later_s := self._hold_plan(begun)):
                self._send_at = begun + later_s
                return
            hurry = pace.runs_dry(begun, state.queue.steps_ahead)
            plan = core.plan(time.monotonic_ns(), hurry=hurry)
            self._stages.planned()
            if plan is None:
                return
            self._send(self._stream, plan)
            self._stages.sent()
            now = time.monotonic()
            pace.sent(now, now - begun, full=waiting and not plan.postponed, tokens=plan.tokens)

    def _hold_plan(self, now: float) -> float:
        """Return the seconds for which the next plan is held back: only where keys share the worker, or did."""
        if self._core.state.several_keys:
            self._shared_until = now + _SHARED_S
        return self._pace.until_needed(now) if now < self._shared_until else 0.0

    def _send(self, stream: WorkerStream, plan: PlannedStep) -> None:
        message = encode_plan(plan.to_plan())
        stream.send(message)
        if self._recorder is not None:
            self._recorder.plan(message, plan.admitted_ids, plan.released_ids)
        if self._core.plans_in_flight == 1:
            self._silence.begin(time.monotonic())
        if self.watchers:
            self._news.append((None, PlanNews.of(plan, self._core)))

    def _hand_over(self) -> None:
        log_failures(self._core)
        self._news.extend(self._core.take_output())
        if self._news:
            self._deliver(self._news)
            self._news = []

    def _take_result(self, stream: WorkerStream, answer: Answer) -> None:
        if stream is not self._stream:
            return
        if self._recorder is not None:
            self._recorder.result(answer.message)
        self._silence.begin(time.monotonic())
        try:
            self._core.take(answer.result, time.monotonic_ns())
        except WrongAnswer as error:  # it does not do what the contract says: a fresh start is all that helps
            log.error("the worker answered wrongly", reason=str(error))
            self._abandon(stream, str(error))
            return
        self._pace.answered(answer.received_s)
        self._core.step_s = self._pace.step_s
        # What this step brought goes out before the next result is taken in: one message for each step.
        self._news.extend(self._core.take_output())

    def _attach(self, stream: WorkerStream) -> None:
        if self._stream is not None:
            self._detach(self._stream, "a new stream began")
        core, most = self._core, stream.plans_in_flight
        policy, stages = core.state.policy, stream.info.pipeline_parallel.size
        self._ahead = min(policy.steps_ahead, most), most
        core.state.queue.steps_ahead = self._ahead[0]
        core.attach(self.shape_of(stream.info))
        self._pace.begin((stages - 1) / policy.micro_batches)
        self._stream = stream
        self._readiness.connect()
        if self._recorder is not None:
            self._recorder.connected(stream.info, stream.plans_in_flight)

    def _detach(self, stream: WorkerStream, reason: str, *, stopping: bool = False) -> None:
        """Take the worker of ``stream`` off the core. ``stopping``: the scheduler itself ended the stream."""
        if stream is not self._stream:
            return
        self._stream = None
        self._readiness.lose(reason)
        self._core.detach()
        if self._recorder is not None:
            self._recorder.disconnected(reason)
        self._core.state.queue.counters.worker_restarts += 1
        facts = {"waiting": len(self._core.state.queue.waiting), "suspects": self._core.suspects}
        (log.info if stopping else log.warning)("worker lost", reason=reason, **facts)

    def _abandon(self, stream: WorkerStream, reason: str) -> None:
        """End a connection that is of no use; the link begins a new one, to this worker or to its successor."""
        stream.end()
        self._detach(stream, reason)

    def _abandon_silent_worker(self) -> None:
        stream = self._stream
        if stream is not None and (step := self._core.oldest_step) is not None and self._silence.look(time.monotonic()):
            for_s = f"{self._silence.seconds:.0f} s"
            self._abandon(
                stream, f"worker {stream.silent()} has not answered plan {step} for {for_s} (flag step_deadline)"
            )

    def _submit(self, request: Request) -> None:
        self._news.append((request.sink, take_in(self._core, request, draining=self._readiness.draining)))

    def _reject(self, sink: int, handle: int, error: TokaError) -> None:
        self._core.state.queue.counters.requests_rejected += 1
        self._news.append((sink, Rejected(handle, error)))

    # -- what others may know

    @property
    def not_ready_reason(self) -> str:
        """Empty when it serves. On the loop's thread, as what follows."""
        return self._readiness.not_ready_reason or self._core.distrust or self._stall.reason

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def connected(self) -> bool:
        """A worker is there; one that does not answer is given up."""
        return self._stream is not None

    def load(self) -> Load:
        if bool(self._forecast) != self._core.state.attached:  # the worker has come, or gone
            self._forecast = forecast_pages(self._core.state)
        return self._core.load(not_ready_reason=self.not_ready_reason, forecast=self._forecast)

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
            self._news.append((None, self.load()))
        if self._stats.line_is_due(now) and self._busy():
            self._stats.log(self.load(), now, self._core.step_s, self._core.state.queue.steps_ahead)
        if (statsd := self._stats.due_statsd(now)) is not None:
            statsd.tell(self.load())

    def _stop(self) -> None:
        self._stopping = True
