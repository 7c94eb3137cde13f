"""Requests of a session that wait until their grammar has been checked."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence

import structlog

from services.common.boundaries import errors_as_internal
from services.common.errors import AlreadyExists, Overloaded, TokaError
from services.scheduler.api.unchecked_requests import UncheckedRequests
from services.scheduler.core.request import Request
from services.scheduler.engine.events import Action
from services.scheduler.engine.loop import EngineLoop
from services.scheduler.grammar.checker import GrammarChecker

log = structlog.get_logger(__name__)

_MOST = 16_384


class PendingGrammars:
    """Queue of one session, on the event loop. Each request is submitted or rejected exactly once."""

    def __init__(
        self, engine: EngineLoop, unchecked: UncheckedRequests, grammar_checker: GrammarChecker, sink: int
    ) -> None:
        self._engine = engine
        self._unchecked = unchecked
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
        self._unchecked.add(request)  # an abort may come before the task begins
        task = asyncio.create_task(self._check(request, name))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._end(task, request))

    def act_on(self, handles: Sequence[int], action: Action) -> None:
        """Run ``action`` for samples: now, or, for samples whose request waits here, when it has been submitted."""
        submitted = [handle for handle in handles if handle not in self._waiting]
        for handle in handles:
            if (request := self._waiting.get(handle)) is not None:
                self._deferred[request.handle].setdefault(action, set()).add(handle)
        if submitted:
            self._engine.act_on(self._sink, submitted, action)

    def close(self) -> None:
        """Cancel all checks at the end of the session."""
        for task in self._tasks:
            task.cancel()

    def _end(self, task: "asyncio.Task[None]", request: Request) -> None:
        self._tasks.discard(task)
        self._unchecked.remove(request)

    async def _check(self, request: Request, name: str) -> None:
        error: TokaError | None = None
        aborted = False
        try:
            with errors_as_internal(log, "a grammar could not be checked", request_id=request.request_id):
                aborted = await self._unchecked.check(self._grammar_checker, request, name)
        except TokaError as refused:
            error = refused
        for handle in range(request.handle, request.handle + request.n):
            self._waiting.pop(handle, None)
        deferred = self._deferred.pop(request.handle, {})
        if error is None:
            self._engine.submit(request, aborted=aborted)
            for action, handles in deferred.items():
                self._engine.act_on(self._sink, sorted(handles), action)
        else:
            self._engine.reject(self._sink, request.handle, error)
