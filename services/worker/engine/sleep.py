"""The sleep of a worker: its memory is given back, and taken again."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from services.common.boundaries import undo_on_error
from services.common.errors import FailedPrecondition, InvalidRequest, TokaError
from services.common.memory_parts import MemoryPart, Parts, part_names
from services.worker.arena.memory import ModelMemory
from services.worker.boot.common import Loaded
from services.worker.engine.engine import Engine
from services.worker.engine.weights import ModelWeights
from services.worker.runner.base import Runner

log = structlog.get_logger(__name__)

T = TypeVar("T")


class Sleeper:
    """Puts a rank to sleep and wakes it, between two steps. RPC threads call the methods, one at a time."""

    def __init__(
        self, memory: ModelMemory, loaded: Loaded, runner: Runner, weights: ModelWeights, engine: Engine
    ) -> None:
        self._memory, self._loaded, self._runner = memory, loaded, runner
        self._weights, self._engine = weights, engine
        self._settling = threading.Lock()  # held while parts fall asleep or wake

    @classmethod
    def of(cls, loaded: Loaded, runner: Runner, weights: ModelWeights, engine: Engine) -> "Sleeper | None":
        """Return the sleeper of a model, or None if it cannot sleep."""
        return None if loaded.memory is None else cls(loaded.memory, loaded, runner, weights, engine)

    def settled_parts(self) -> Parts:
        """Return the parts that are asleep. Wait for a running call first, which a lost scheduler may have begun."""
        with self._settling:
            return self._memory.asleep

    def sleep(self, parts: Parts, level: int, is_wanted: Callable[[], bool] = lambda: True) -> int:
        """Give the memory of ``parts`` back, and refuse plans. Return its size in bytes.

        Level 1 keeps a copy of the weights in the memory of the host. Raises ``FailedPrecondition`` if the host has too
        little; then nothing has changed. Raises ``Unavailable`` if the worker ends, or ``is_wanted`` returns False
        before it begins.
        """
        memory = self._memory

        def sleep() -> int:
            released = memory.sleep(parts, drop=level > 1)
            self._engine.asleep = bool(memory.asleep)
            return released

        with self._weights.changing, self._settling:
            if level == 1 and MemoryPart.WEIGHTS in parts - memory.asleep and not memory.dropped:
                memory.reserve_copy()
            released = self._run_between_steps(sleep, is_wanted)
        log.info("asleep", parts=part_names(memory.asleep), level=level, released_gib=round(released / 2**30, 2))
        return released

    def wake(self, parts: Parts, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Take memory for ``parts`` again. When no part is asleep, accept plans.

        Raises ``FailedPrecondition`` if the device has too little memory, or if dropped weights cannot be read again;
        then the same parts as before are asleep. Raises ``Unavailable`` as ``sleep`` does.
        """
        memory = self._memory

        def accept_plans() -> None:
            self._engine.asleep = bool(memory.asleep)

        with self._weights.changing, self._settling:
            woken = parts & memory.asleep
            self._run_between_steps(lambda: memory.wake(woken), is_wanted)
            if memory.dropped and not memory.asleep:
                with undo_on_error(lambda: self._run_between_steps(lambda: memory.sleep(woken, drop=True))):
                    self._reload()
            self._run_between_steps(accept_plans)
        log.info("woken", parts=part_names(woken), asleep=part_names(memory.asleep))

    def _reload(self) -> None:
        """Read the weights that were dropped. Raises ``FailedPrecondition`` if that is impossible."""
        source, model, version = self._loaded.source, self._loaded.model, self._weights.version

        def write() -> None:
            if staged is None:
                source.fill(model, dummy=True)
            else:
                source.apply(staged, model)
            self._runner.weights_changed()
            self._memory.mark_reloaded()

        try:
            dummy = self._loaded.dummy and not version.update_id
            staged = None if dummy else source.stage(Path(version.directory), model)
            self._run_between_steps(write)
        except (FailedPrecondition, InvalidRequest) as error:
            raise FailedPrecondition(
                f"the weights were dropped, and cannot be read again from {version.directory}: {error.message}; wake"
                " the weights alone, replace them, and then wake the other parts"
            ) from error

    def _run_between_steps(self, call: Callable[[], T], is_wanted: Callable[[], bool] = lambda: True) -> T:
        """Run ``call`` between two steps, and return its result. A ``TokaError`` does not end the worker.

        ``is_wanted`` is as in ``Engine.run_alone``.
        """
        results: list[T] = []
        errors: list[TokaError] = []

        def run() -> None:
            try:
                results.append(call())
            except TokaError as error:
                errors.append(error)

        self._engine.run_alone(run, is_wanted).result()
        if errors:
            raise errors[0]
        return results[0]
