"""The compute thread boots the runner and runs plans in the order they came; another answers when steps end."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from services.common.errors import FailedPrecondition, Internal, InvalidRequest, TokaError
from services.common.plan.codec import decode_plan, encode_result
from services.common.process.tracing import Tracing
from services.worker.boot.common import Booted
from services.worker.engine.totals import StepTotals
from services.worker.engine.traces import Prefill, PrefillTraces
from services.worker.parallel.group import RankGroup
from services.worker.runner.base import DeviceLost, Runner
from services.worker.step.output import StepOutput
from tokasaurus.worker.v1 import plan_pb2

log = structlog.get_logger(__name__)


class Client(Protocol):
    """Who sent plans; called in the compute thread."""

    closed: bool  # nothing more is wanted
    stream_id: str  # the same on all ranks of a replica

    def answer(self, result: plan_pb2.StepResult) -> None: ...

    def fail(self, error: TokaError) -> None: ...

    def finish(self) -> None: ...


class Engine:
    """Owns the compute thread, which owns the runner, its slots and its cache. Methods may be called by any thread."""

    def __init__(self, boot: Callable[[], Booted], tracing: Tracing | None = None) -> None:
        self._boot = boot
        self._traces = PrefillTraces(tracing) if tracing is not None else None  # of the compute thread
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of what follows, and of the order of work
        self._queued_plans = 0
        self._sender: Client | None = None  # of whom plans are taken
        self._received = 0  # its plans
        self._client: Client | None = None  # of the compute thread
        self._runner: Runner  # of the compute thread, once booted
        self._group: RankGroup | None = None  # there are other ranks
        self.totals = StepTotals()
        self._busy_since: dict[str, float] = {}  # by thread, while it is at work
        self._seen: dict[str, float] = {}  # that, as ``progresses`` saw it last
        # What is owed to clients, in order, and waits for the device.
        self._owed: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None  # what the answering thread ended with

    def start(self) -> tuple["asyncio.Future[Booted]", "asyncio.Future[None]"]:
        """Start the thread from an asyncio loop. The futures: the boot is done; the thread has ended, or it never will,
        because the other ranks of its replica are lost."""
        self._loop = asyncio.get_running_loop()
        self._futures = booted, ended = self._loop.create_future(), self._loop.create_future()
        threading.Thread(target=self._serve, name="compute", daemon=True).start()
        return booted, ended

    def end(self, error: BaseException | None) -> None:
        """Whoever waits for the boot or for the end of the thread waits no longer, whatever the thread is at."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            for future in self._futures:
                self._loop.call_soon_threadsafe(_settle, future, None, error)

    def stop(self) -> None:
        """Let the thread end after the work that is queued."""
        self._work.put(None)

    def open(self, client: Client) -> None:
        """From here on plans come from ``client``; every slot is free and step 1 is next."""
        with self._lock:
            self._end(self._sender)
            self._sender, self._received = client, 0
            self._work.put(lambda: self._take_over(client))

    def submit(self, client: Client, plan: plan_pb2.StepPlan) -> None:
        """Queue a plan of ``client``, which gets one answer, unless it is closed or fails before."""
        arrived = time.perf_counter_ns()
        with self._lock:
            if self._sender is client:
                self._received += 1
                self._queued_plans += 1
                self._work.put(lambda: self._run(client, plan, arrived))

    def finish(self, client: Client) -> None:
        """``client`` sends no more plans: tell it when its last one is answered."""
        with self._lock:
            self._end(client)
            self._work.put(lambda: self._owed.put(client.finish))

    def close(self, client: Client) -> None:
        """``client`` is gone: free its slots."""
        with self._lock:
            self._end(client)
            self._work.put(lambda: self._leave(client))

    @property
    def queued_plans(self) -> int:
        """Received and not yet started."""
        return self._queued_plans

    def busy_s(self) -> float:
        """For how many seconds the piece of work at hand has been running; 0 when idle."""
        since = list(self._busy_since.copy().values())
        return time.monotonic() - min(since) if since else 0.0

    def progresses(self) -> bool:
        """Whether no thread is still at the piece of work that it was at when this was asked last. For one asker."""
        before, self._seen = self._seen, self._busy_since.copy()
        return not any(before.get(thread) == since for thread, since in self._seen.items())

    def _serve(self) -> None:
        made: Booted | None = None
        try:
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
            self._owed.put(None)
            answering.join()
            outcome = self._broken
        except BaseException as error:
            outcome = error
        if outcome is not None and self._group is not None:
            self.end(self._group.cause(outcome))  # nothing to close: the process ends
            return
        try:
            if made is not None and self._broken is None:
                made.runner.close()
        except BaseException as error:  # the device fails at last: whoever waits must still hear of the end
            outcome = outcome or error
        self.end(outcome)

    def _end(self, client: Client | None, *, refused: bool = False) -> None:
        """Under the lock: what was received of ``client`` so far is all that will be run, and without the plan at hand
        if that is ``refused``."""
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

    def _run(self, client: Client, message: plan_pb2.StepPlan, arrived: int) -> None:
        started = time.perf_counter_ns()
        with self._lock:
            self._queued_plans -= 1
        # The other ranks run all that was received, too.
        if self._client is not client or (client.closed and self._group is None):
            return
        try:
            plan = decode_plan(message)
            decoded_ns = time.perf_counter_ns() - started
            step = self._runner.start(plan)
        except DeviceLost:  # no later step would do better: the thread ends, and with it the process
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
            waited_ns = started - arrived
            prefills = self._traces.see(message, waited_ns) if self._traces is not None else []
            answer = partial(self._answer, client, waited_ns, decoded_ns, prefills)
            if isinstance(step, StepOutput):
                answer(step)
            else:
                self._owed.put(lambda: answer(step.result()))

    def _refuse(self, client: Client, error: TokaError) -> None:
        with self._lock:
            self._end(client, refused=True)
        self._leave(client)
        self._owed.put(lambda: client.fail(error))

    def _answer(
        self, client: Client, queued_ns: int, decoded_ns: int, prefills: Sequence[Prefill], output: StepOutput
    ) -> None:
        output.timing.prepare += decoded_ns
        output.timing.queued = queued_ns
        self.totals.add(queued_ns, output.timing)
        if not client.closed:
            client.answer(encode_result(output.to_result(self._queued_plans)))
        for prefill in prefills:
            prefill.end(output.timing)

    def _answer_all(self) -> None:
        """The answering thread."""
        try:
            while (owed := self._owed.get()) is not None:
                self._busy_since["answers"] = time.monotonic()
                owed()
                del self._busy_since["answers"]
        except BaseException as error:
            self._broken = error
            self._work.put(None)
            log.error("a step cannot be answered", exc_info=error)


def _settle(future: "asyncio.Future[Any]", value: object, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
