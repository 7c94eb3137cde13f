"""Requests of a session that wait until their grammar has been checked."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from services.common.boundaries import errors_as_internal
from services.common.errors import AlreadyExists, Overloaded, TokaError
from services.scheduler.core.request import Request
from services.scheduler.engine.loop import EngineLoop
from services.scheduler.grammar.checker import GrammarChecker

log = structlog.get_logger(__name__)

_MOST = 16_384
_AFTER_DEADLINE_S = 0.01  # margin after which a request is overdue by any clock


async def check_before_deadline(grammar_checker: GrammarChecker, request: Request, name: str) -> None:
    """Check the grammar of ``request``, called ``name`` in errors. Raises as ``GrammarChecker.check`` does.

    It also returns at the request's deadline. A request that is submitted then ends as overdue.
    """
    client = request.fairness_key, request.sink
    left = None if request.deadline_ms is None else request.deadline_ms / 1000 - time.monotonic() + _AFTER_DEADLINE_S
    try:
        await asyncio.wait_for(grammar_checker.check(request.sampling.grammar, name, client), left)
    except TimeoutError:
        log.info("a request's deadline passed before its grammar was checked", request_id=request.request_id)


class PendingGrammars:
    """Queue of one session, on the event loop. Each request is submitted or rejected exactly once."""

    def __init__(self, engine: EngineLoop, grammar_checker: GrammarChecker, sink: int) -> None:
        self._engine = engine
        self._grammar_checker = grammar_checker
        self._sink = sink
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, Request] = {}  # by the handle of each sample
        self._cancels: dict[int, set[int]] = {}  # cancelled handles by the handle of their request

    def check_handles(self, request: Request) -> None:
        """Raise ``AlreadyExists`` if a request that waits here uses one of the handles. The core checks the others."""
        if not self._waiting:
            return
        for handle in range(request.handle, request.handle + request.n):
            if handle in self._waiting:
                raise AlreadyExists(f"handle {handle} belongs to an unfinished sample of this session; choose another")

    def begin(self, request: Request, name: str) -> None:
        """Submit the request when its grammar, called ``name``, has been checked. Raises ``Overloaded``."""
        if len(self._tasks) >= _MOST:
            raise Overloaded(
                f"{_MOST} requests of this session wait for the check of their grammars; send this request later",
                retry_after_s=1.0,
                reason="GRAMMARS_WAIT",
            )
        self._waiting |= dict.fromkeys(range(request.handle, request.handle + request.n), request)
        task = asyncio.create_task(self._check(request, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def defer_cancels(self, handles: Sequence[int]) -> list[int]:
        """Return the handles of submitted requests. Cancel the others when their requests have been submitted."""
        if not self._waiting:
            return list(handles)
        for handle in handles:
            if (request := self._waiting.get(handle)) is not None:
                self._cancels.setdefault(request.handle, set()).add(handle)
        return [handle for handle in handles if handle not in self._waiting]

    def close(self) -> None:
        """Cancel all checks at the end of the session."""
        for task in self._tasks:
            task.cancel()

    async def _check(self, request: Request, name: str) -> None:
        error: TokaError | None = None
        try:
            with errors_as_internal(log, "a grammar could not be checked", request_id=request.request_id):
                await check_before_deadline(self._grammar_checker, request, name)
        except TokaError as refused:
            error = refused
        for handle in range(request.handle, request.handle + request.n):
            self._waiting.pop(handle, None)
        cancels = self._cancels.pop(request.handle, set())
        if error is None:
            self._engine.submit(request)
            self._engine.cancel(self._sink, sorted(cancels))
        else:
            self._engine.reject(self._sink, request.handle, error)
