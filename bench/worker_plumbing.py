"""Measure the cost of passing plans to a runner and results back: ``python -m bench.worker_plumbing [rows=1]
[in_flight=8] [steps=20000] [skip=2000] [step_us=0] [host_us=0]``.

Runs two processes. One is a worker's server whose runner takes ``host_us`` of Python's time to launch a step, and
``step_us`` on a simulated device. The other has the scheduler's link and a thread that sends a plan for every result.
The program prints steps per second, and the CPU time for each step in both processes, for the worker also by thread.
The last line is one JSON object.
"""

import asyncio
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import psutil
from pydantic import Field

from bench.server import free_port, report
from services.common.config import WorkerConfig, from_command_line
from services.common.flags import Config, Int
from services.common.plan.codec import encode_plan
from services.common.plan.types import Batch, Plan, WorkerLimits
from services.common.process.service import Stop
from services.scheduler.workers.link import WorkerLink
from services.scheduler.workers.stream import ReceivedResult, WorkerStream
from services.worker.step.output import Sampled, StepOutput

_PATIENCE_S = 60.0


class BenchConfig(Config):
    """The flags. With ``listen``, this process is the worker."""

    rows: Int = Field(1, ge=1)
    in_flight: Int = Field(8, ge=1, le=16)
    steps: Int = Field(20_000, ge=1, description="measured steps")
    skip: Int = Field(2_000, ge=1, description="steps before the measurement")
    step_us: Int = Field(0, ge=0, description="time of a step on the simulated device")
    host_us: Int = Field(0, ge=0, description="time that launching a step takes")
    listen: str | None = None


class Idle:
    """A runner whose host takes ``host_s`` for each step, and its device ``step_s``. Every token is 1."""

    def __init__(self, rows: int, step_s: float, host_s: float) -> None:
        self.limits = WorkerLimits(16, 1024, rows, rows, 1024, 1000, 5)
        self._host_s, self._step_s = host_s, step_s
        self._free = 0.0  # time at which the device will be idle
        slots = np.arange(rows)
        self._sampled = Sampled(slots, np.ones_like(slots), np.ones(rows, bool))

    def start(self, plan: Plan) -> "IdleStep":
        began = time.perf_counter()
        while time.perf_counter() - began < self._host_s:
            pass
        self._free = max(self._free, time.perf_counter()) + self._step_s
        return IdleStep(StepOutput(plan.step, self._sampled), self._free if self._step_s else 0.0)

    def reset(self) -> None: ...

    def close(self) -> None: ...


class IdleStep:
    def __init__(self, output: StepOutput, ends: float) -> None:
        self._output, self._ends = output, ends

    def result(self) -> StepOutput:
        if self._ends and (left := self._ends - time.perf_counter()) > 0:
            time.sleep(left)
        return self._output


class StepLoop:
    """A thread that sends a plan for every result, as the scheduler's loop does."""

    def __init__(self, config: BenchConfig) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._rows, self._in_flight = config.rows, config.in_flight
        self._sent = 0
        self.marks = {config.skip: threading.Event(), config.skip + config.steps: threading.Event()}
        threading.Thread(target=self._run, name="step-loop", daemon=True).start()

    def worker_connected(self, stream: WorkerStream) -> None:
        self._inbox.put((stream, None))

    def worker_result(self, stream: WorkerStream, answer: ReceivedResult) -> None:
        self._inbox.put((stream, answer))

    def worker_lost(self, stream: WorkerStream, reason: str, *, stopping: bool = False) -> None:
        print(f"worker lost: {reason}", file=sys.stderr)

    def worker_missing(self, reason: str) -> None:
        print(f"no worker: {reason}", file=sys.stderr)

    def _run(self) -> None:
        while True:
            stream, answer = self._inbox.get()
            if answer is None:
                for _ in range(self._in_flight):
                    self._send(stream)
                continue
            if (mark := self.marks.get(answer.result.step)) is not None:
                mark.set()
            self._send(stream)

    def _send(self, stream: WorkerStream) -> None:
        self._sent += 1
        rows = np.arange(self._rows)
        batch = Batch(rows, np.ones_like(rows)) if self._sent == 1 else None
        stream.send(encode_plan(Plan(self._sent, batch=batch)))


def main() -> None:
    """Measure, print a table, and a JSON object as the last line."""
    config = from_command_line(BenchConfig)
    if config.listen is not None:
        asyncio.run(_serve(config))
        return
    address = f"127.0.0.1:{free_port()}"
    arguments = [f"rows={config.rows}", f"step_us={config.step_us}", f"host_us={config.host_us}", f"listen={address}"]
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.worker_plumbing", *arguments], stdout=subprocess.PIPE, text=True
    )
    loop = StepLoop(config)
    link = WorkerLink([address], "plumbing", config.in_flight, loop, lambda info: None, print)
    link.start()
    try:
        figures = _measure(config, loop, psutil.Process(child.pid))
    finally:
        child.send_signal(signal.SIGTERM)
        link.stop()
    # The names are among the lines of the worker's log.
    names = json.loads(next(line for line in child.communicate()[0].splitlines() if line.startswith("{")))
    threads = {}
    for thread, us in figures.pop("threads").items():
        name = names.get(str(thread), "grpc core")
        threads[name] = round(threads.get(name, 0.0) + us, 1)
    figures["worker_threads_us"] = dict(sorted(threads.items(), key=lambda pair: -pair[1]))
    print("  ".join(f"{name} {value}" for name, value in figures.items()))
    report(vars(config) | figures)


def _measure(config: BenchConfig, loop: StepLoop, worker: psutil.Process) -> dict[str, Any]:
    first, last = loop.marks.values()
    if not first.wait(_PATIENCE_S):
        raise SystemExit("the worker does not answer")
    began, before, mine = time.perf_counter(), _threads(worker), time.process_time()
    last.wait()
    seconds, after, mine = time.perf_counter() - began, _threads(worker), time.process_time() - mine
    spent = {thread: (after[thread] - before.get(thread, 0.0)) / config.steps * 1e6 for thread in after}
    return {
        "steps_per_s": round(config.steps / seconds),
        "worker_us": round(sum(spent.values()), 1),
        "driver_us": round(mine / config.steps * 1e6, 1),
        "threads": {thread: us for thread, us in spent.items() if us > 0.5},
    }


def _threads(process: psutil.Process) -> dict[int, float]:
    """Return CPU seconds by thread."""
    return {thread.id: thread.user_time + thread.system_time for thread in process.threads()}


async def _serve(config: BenchConfig) -> None:
    """Run the worker, and print the names of its threads at the end."""
    from services.worker.boot.common import Booted
    from services.worker.server import serve

    stop = Stop()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: (_tell_threads(), stop.set()))
    runner = Idle(config.rows, config.step_us / 1e6, config.host_us / 1e6)
    await serve(WorkerConfig(worker_listen=config.listen), stop, load=lambda: Booted(runner, "idle", "cpu", "none"))


def _tell_threads() -> None:
    names = json.dumps({thread.native_id: thread.name for thread in threading.enumerate()})
    sys.stdout.write(f"\n{names}\n")  # one write, because other threads write to the log
    sys.stdout.flush()


if __name__ == "__main__":
    main()
