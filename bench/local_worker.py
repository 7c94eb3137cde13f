"""A worker's runner in this process, without gRPC. As in the engine, one thread starts steps and another waits."""

import os
import queue
import shlex
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import FlagError, build, split_arguments
from services.common.plan.types import Plan
from services.worker.boot.caches import keep_compiled_code_in
from services.worker.runner.base import Runner
from services.worker.step.output import StepOutput

if TYPE_CHECKING:
    from services.worker.boot.common import Booted

# A further step would wait for a place in the runner's ring, which is free only after a result is read.
MOST_IN_FLIGHT = 4


@dataclass(frozen=True)
class LocalWorker:
    """A booted runner with its flags."""

    config: WorkerConfig
    booted: "Booted"

    @property
    def runner(self) -> Runner:
        return self.booted.runner

    @property
    def on_cuda(self) -> bool:
        return self.booted.device.startswith("cuda")


def read_worker_flags(flags: str, **defaults: object) -> WorkerConfig:
    """Parse flags that are quoted as in a shell, over ``defaults``. Exit with status 2 if a flag is wrong."""
    try:
        return build(WorkerConfig, defaults | split_arguments(WorkerConfig, shlex.split(flags)))
    except FlagError as error:
        refuse(f"worker_flags: {error}")


def prepare(config: WorkerConfig) -> None:
    """Set the environment as in ``toka-worker``, before torch is loaded. Exit with status 2 if a flag is refused."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        keep_compiled_code_in(config.compile_cache_dir)
    except InvalidRequest as error:
        refuse(f"worker_flags: {error.message}")


def boot_worker(config: WorkerConfig) -> LocalWorker:
    """Boot in this thread, after ``prepare``. Exit with status 2 if a flag is refused."""
    try:
        from services.worker.boot.common import boot  # loads torch

        return LocalWorker(config, boot(config))
    except InvalidRequest as error:
        refuse(f"worker_flags: {error.message}")


def refuse(reason: str) -> None:
    """Print ``reason`` and exit with status 2."""
    print(f"{os.path.basename(sys.argv[0])}: {reason}", file=sys.stderr)
    raise SystemExit(2)


class Feeder:
    """A feeder that keeps several plans in flight and passes on their results in order. Called by one thread."""

    def __init__(self, runner: Runner, in_flight: int) -> None:
        self._runner, self._in_flight = runner, in_flight
        self._places = threading.Semaphore(in_flight)
        self._owed: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None  # raised in the answering thread
        self._thread = threading.Thread(target=self._answer_all, name="answers", daemon=True)
        self._thread.start()

    def put(self, plan: Plan, took_ns: int, done: Callable[[StepOutput], None]) -> None:
        """Start ``plan`` when fewer than ``in_flight`` steps are in flight. Raises the error of an earlier step.

        ``done`` gets the result, in another thread. ``took_ns`` nanoseconds are added to the preparation.
        """
        self._places.acquire()
        if self._error is not None:
            raise self._error
        step = self._runner.start(plan)

        def answer() -> None:
            output = step if isinstance(step, StepOutput) else step.result()
            output.timing.prepare += took_ns
            done(output)
            self._places.release()

        self._owed.put(answer)

    def drain(self) -> None:
        """Wait until every step has its result. Raises the error of a step."""
        for _ in range(self._in_flight):
            self._places.acquire()
            if self._error is not None:
                raise self._error
        self._places.release(self._in_flight)

    def close(self) -> None:
        """Pass on the outstanding results, and end the thread."""
        self._owed.put(None)
        self._thread.join()

    def _answer_all(self) -> None:
        while (answer := self._owed.get()) is not None:
            try:
                answer()
            except BaseException as error:
                self._error = error
                self._places.release(self._in_flight)  # wake a waiting thread, which raises the error
                return
