"""Requests of a session that wait until their grammar has been checked."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

import structlog

from services.common.boundaries import errors_as_internal
from services.common.errors import AlreadyExists, Overloaded, TokaError
from services.common.request_ids import is_chosen
from services.scheduler.core.request import Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.engine.events import Action
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
        # Actions on samples whose requests wait here: handles by the handle of the request and the action.
        self._deferred: defaultdict[int, dict[Action, set[int]]] = defaultdict(dict)

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

    def act_on(self, handles: Sequence[int], action: Action) -> None:
        """Run ``action`` for samples: now, or, for samples whose request waits here, when it has been submitted."""
        submitted = [handle for handle in handles if handle not in self._waiting]
        for handle in handles:
            if (request := self._waiting.get(handle)) is not None:
                self._deferred[request.handle].setdefault(action, set()).add(handle)
        if submitted:
            self._engine.act_on(self._sink, submitted, action)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """End the samples that wait here when their requests have been submitted. Return the number of the samples.

        ``request_ids`` is as for ``is_chosen``.
        """
        handles = [handle for handle, request in self._waiting.items() if is_chosen(request.request_id, request_ids)]
        self.act_on(handles, Scheduler.end)
        return len(handles)

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
        deferred = self._deferred.pop(request.handle, {})
        if error is None:
            self._engine.submit(request)
            for action, handles in deferred.items():
                self._engine.act_on(self._sink, sorted(handles), action)
        else:
            self._engine.reject(self._sink, request.handle, error)
