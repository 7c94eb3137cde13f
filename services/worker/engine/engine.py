"""The engine: one thread boots the runner and runs plans in order; another sends results when steps end."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import structlog

from services.common.boundaries import errors_to
from services.common.errors import FailedPrecondition, Internal, InvalidRequest, TokaError, Unavailable
from services.common.plan.codec import decode_plan, encode_result
from services.common.process.tracing import Tracing
from services.worker.boot.common import Booted
from services.worker.engine.totals import StepTotals
from services.worker.engine.traces import PrefillTrace, PrefillTraces
from services.worker.parallel.group import RankGroup
from services.worker.runner.base import DeviceLost, Runner
from services.worker.step.output import StepOutput
from tokasaurus.worker.v1 import plan_pb2

log = structlog.get_logger(__name__)


class Client(Protocol):
    """The sender of plans. Its methods are called in the engine's threads."""

    closed: bool  # the client needs no more results
    stream_id: str  # the same on all ranks of a replica

    def answer(self, result: plan_pb2.StepResult, *, with_next: bool = False) -> None: ...

    def fail(self, error: TokaError) -> None: ...

    def finish(self) -> None: ...


class Engine:
    """Owner of the compute thread, which owns the runner with its slots and cache. Any thread may call the methods."""

    def __init__(self, boot: Callable[[], Booted], tracing: Tracing | None = None) -> None:
        self._boot = boot
        self._traces = PrefillTraces(tracing) if tracing is not None else None  # used by the compute thread
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # protects the next five fields and the order of ``_work``
        self._alone: list[Future[None]] = []  # calls of ``run_alone``
        self._over = False  # the compute thread runs no more calls
        self._queued_plans = 0
        self._sender: Client | None = None  # the client whose plans are accepted
        self._received = 0  # plans of the sender
        self._client: Client | None = None  # the client whose plans run; used by the compute thread
        self.asleep = False  # plans are refused; used by the compute thread
        self._runner: Runner  # set by the boot; used by the compute thread
        self._group: RankGroup | None = None  # None if the replica has one rank
        self.totals = StepTotals()
        self._busy_since: dict[str, float] = {}  # by thread, in seconds; without the threads that are idle
        self._seen: dict[str, float] = {}  # ``_busy_since`` at the last call of ``progresses``
        self._replies: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # calls of clients, in order
        self._broken: BaseException | None = None  # the failure of the answering thread

    def start(self) -> tuple["asyncio.Future[Booted]", "asyncio.Future[None]"]:
        """Start the compute thread from an asyncio loop.

        Return two futures: the outcome of the boot, and the end of the thread. The second one fails at once if the
        other ranks of the replica are lost, even if the thread is blocked.
        """
        self._loop = asyncio.get_running_loop()
        self._futures = booted, ended = self._loop.create_future(), self._loop.create_future()
        threading.Thread(target=self._serve, name="compute", daemon=True).start()
        return booted, ended

    def end(self, error: BaseException | None) -> None:
        """Complete both futures of ``start`` that are still open, even if the thread is blocked."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller waits
            for future in self._futures:
                self._loop.call_soon_threadsafe(_settle, future, None, error)

    def stop(self) -> None:
        """End the thread after the queued work."""
        self._work.put(None)

    def open(self, client: Client) -> None:
        """Accept plans from ``client`` alone from now on, with all slots free and step 1 next."""
        with self._lock:
            self._stop_receiving(self._sender)
            self._sender, self._received = client, 0
            self._work.put(lambda: self._take_over(client))

    def submit(self, client: Client, plan: plan_pb2.StepPlan) -> None:
        """Queue a plan of ``client``. It receives one result, unless it is closed or fails earlier."""
        arrived_ns = time.perf_counter_ns()
        with self._lock:
            if self._sender is client:
                self._received += 1
                self._queued_plans += 1
                self._work.put(lambda: self._run(client, plan, arrived_ns))

    def run_alone(self, call: Callable[[], None], is_wanted: Callable[[], bool] = lambda: True) -> "Future[None]":
        """Run ``call`` in the compute thread, after the plans that were submitted. Return the future of its end.

        An exception also ends the thread: the state of the device is unknown then. The future fails with
        ``Unavailable`` if the thread has ended, or ends before the call, and if ``is_wanted`` returns False just before
        the call, which then does not run.
        """
        done: Future[None] = Future()

        def run() -> None:
            if not is_wanted():
                done.set_exception(Unavailable("the scheduler was lost or replaced before its call could run"))
                return
            try:
                call()
            except BaseException as error:
                done.set_exception(error)
                raise
            done.set_result(None)

        with self._lock:
            if not self._over:
                self._alone = [each for each in self._alone if not each.done()] + [done]
                self._work.put(run)
                return done
        done.set_exception(_has_ended())
        return done

    def finish(self, client: Client) -> None:
        """Accept no more plans from ``client``, and call its ``finish`` after its last result."""
        with self._lock:
            self._stop_receiving(client)
            self._work.put(lambda: self._replies.put(client.finish))

    def close(self, client: Client) -> None:
        """Accept no more plans from ``client``, which has disconnected, and free its slots."""
        with self._lock:
            self._stop_receiving(client)
            self._work.put(lambda: self._leave(client))

    @property
    def queued_plans(self) -> int:
        """The number of plans that are received and not started."""
        return self._queued_plans

    def busy_s(self) -> float:
        """Return the seconds since the oldest running piece of work began, or 0 if the threads are idle."""
        since = list(self._busy_since.copy().values())
        return time.monotonic() - min(since) if since else 0.0

    def progresses(self) -> bool:
        """Return whether every thread has finished the work that it did at the last call. Only for one caller."""
        before, self._seen = self._seen, self._busy_since.copy()
        return not any(before.get(thread) == since for thread, since in self._seen.items())

    def _serve(self) -> None:
        made: Booted | None = None
        errors: list[BaseException] = []
        with errors_to(errors.append, BaseException):
            made = self._boot()
            self._runner, self._group = made.runner, made.group
            answering = threading.Thread(target=self._answer_all, name="answers", daemon=True)
            answering.start()
            self._loop.call_soon_threadsafe(_settle, self._futures[0], made, None)
            if self._group is not None:
                self._group.watch(self.end)
            while (work := self._work.get()) is not None and self._broken is None:
                self._busy_since["compute"] = time.monotonic()
                work()
                del self._busy_since["compute"]
            self._replies.put(None)
            answering.join()
            if self._broken is not None:
                raise self._broken
        self._fail_alone()
        if errors and self._group is not None:
            self.end(self._group.cause(errors[0]))  # the process exits, so the runner stays open
            return
        with errors_to(errors.append, BaseException):  # the futures are set even if the device fails now
            if made is not None and self._broken is None:
                made.runner.close()
        self.end(errors[0] if errors else None)

    def _fail_alone(self) -> None:
        """Fail the calls of ``run_alone`` that the thread has not run, because it ends."""
        with self._lock:
            self._over = True
        for done in self._alone:
            if not done.done():
                done.set_exception(_has_ended())

    def _stop_receiving(self, client: Client | None, *, refused: bool = False) -> None:
        """Accept no more plans from ``client``, and report to the other ranks how many run here. Holds the lock.

        ``refused``: the plan that has just started is refused and does not count.
        """
        if client is None or self._sender is not client:
            return
        self._sender = None
        if self._group is not None:
            run = self._received - self._queued_plans - 1 if refused else self._received
            self._group.agreement.settle(client.stream_id, run, refused=refused)

    def _take_over(self, client: Client) -> None:
        self._reset()
        self._client = client

    def _leave(self, client: Client) -> None:
        if self._client is client:
            self._reset()
            self._client = None

    def _reset(self) -> None:
        self._runner.reset()
        if self._traces is not None:
            self._traces.reset()

    def _run(self, client: Client, message: plan_pb2.StepPlan, arrived_ns: int) -> None:
        started_ns = time.perf_counter_ns()
        with self._lock:
            self._queued_plans -= 1
        # With other ranks, the plans of a closed client run as well, since they run there.
        if self._client is not client or (client.closed and self._group is None):
            return
        try:
            if self.asleep:
                raise FailedPrecondition("the worker is asleep; wake it first")
            plan = decode_plan(message)
            decoded_ns = time.perf_counter_ns() - started_ns
            step = self._runner.start(plan)
        except DeviceLost:  # later steps would fail as well, so the thread ends, and the process exits
            raise
        except (InvalidRequest, FailedPrecondition) as error:
            self._refuse(client, error)
        except Exception as error:
            if not isinstance(error, TokaError):
                log.error("step failed", step=message.step, exc_info=error)
            if self._group is not None:  # the other ranks wait for this one
                raise
            details = f"step {message.step} failed; the worker's log has the details"
            self._refuse(client, error if isinstance(error, TokaError) else Internal(details))
        else:
            queued_ns = started_ns - arrived_ns
            age_ns = time.perf_counter_ns() - arrived_ns  # on a CPU, the step has ended
            prefills = self._traces.start_plan(message, age_ns) if self._traces is not None else []
            answer = partial(self._answer, client, message.result_with_next, queued_ns, decoded_ns, prefills)
            if isinstance(step, StepOutput):
                answer(step)
            else:
                self._replies.put(lambda: answer(step.result()))

    def _refuse(self, client: Client, error: TokaError) -> None:
        with self._lock:
            self._stop_receiving(client, refused=True)
        self._leave(client)
        self._replies.put(lambda: client.fail(error))

    def _answer(
        self,
        client: Client,
        with_next: bool,
        queued_ns: int,
        decoded_ns: int,
        prefills: Sequence[PrefillTrace],
        output: StepOutput,
    ) -> None:
        output.timing.prepare += decoded_ns
        output.timing.queued = queued_ns
        self.totals.add(queued_ns, output.timing)
        if not client.closed:
            client.answer(encode_result(output.to_result(self._queued_plans)), with_next=with_next)
        for prefill in prefills:
            prefill.end(output.timing)

    def _answer_all(self) -> None:
        """Call clients with results, as the device completes them. Runs in the answering thread."""
        with errors_to(self._break, BaseException):
            while (reply := self._replies.get()) is not None:
                self._busy_since["answers"] = time.monotonic()
                reply()
                del self._busy_since["answers"]

    def _break(self, error: BaseException) -> None:
        """End the compute thread after the answering thread failed."""
        self._broken = error
        self._work.put(None)
        log.error("cannot send the result of a step", exc_info=error)


def _has_ended() -> Unavailable:
    return Unavailable("the compute thread of the worker has ended")


def _settle(future: "asyncio.Future[Any]", value: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
