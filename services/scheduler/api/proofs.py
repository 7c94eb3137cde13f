"""Requests of one session whose grammar has to be proven before they are queued."""

import asyncio
import time
from collections.abc import Sequence

import structlog

from services.common.errors import AlreadyExists, Internal, Overloaded, TokaError
from services.scheduler.core.request import Request
from services.scheduler.engine.loop import EngineLoop
from services.scheduler.grammar.prover import Prover

log = structlog.get_logger(__name__)

_MOST = 16_384
_BEHIND_DEADLINE_S = 0.01  # what is submitted without a proof must be overdue, whoever's clock is read


async def prove_in_time(prover: Prover, request: Request, name: str) -> None:
    """Raises as ``Prover.prove`` does. Returns at the request's deadline, too: submitted then, it ends as overdue."""
    client = request.fairness_key, request.sink
    left = None if request.deadline_ms is None else request.deadline_ms / 1000 - time.monotonic() + _BEHIND_DEADLINE_S
    try:
        await asyncio.wait_for(prover.prove(request.sampling.grammar, name, client), left)
    except TimeoutError:
        log.info("a request's deadline came before its grammar was checked", request_id=request.request_id)


class Proofs:
    """Owned by its session, on the asyncio loop. Each request that was begun is submitted or rejected, once."""

    def __init__(self, engine: EngineLoop, prover: Prover, sink: int) -> None:
        self._engine = engine
        self._prover = prover
        self._sink = sink
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, Request] = {}  # by the handle of each sample
        self._cancels: dict[int, set[int]] = {}  # handles cancelled meanwhile, by their request's

    def check_handles(self, request: Request) -> None:
        """``AlreadyExists`` when one of its handles belongs to a request that waits here. Of others the core knows."""
        if not self._waiting:
            return
        for handle in range(request.handle, request.handle + request.n):
            if handle in self._waiting:
                raise AlreadyExists(f"handle {handle} belongs to an unfinished sample of this session; choose another")

    def begin(self, request: Request, name: str) -> None:
        """Submit it when its grammar, called ``name``, is proven. Raises ``Overloaded``."""
        if len(self._tasks) >= _MOST:
            raise Overloaded(
                f"{_MOST} requests of this session wait until their grammars are checked; send this one later",
                retry_after_s=1.0,
                reason="GRAMMARS_WAIT",
            )
        self._waiting |= dict.fromkeys(range(request.handle, request.handle + request.n), request)
        task = asyncio.create_task(self._prove(request, name))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def keep_cancels(self, handles: Sequence[int]) -> list[int]:
        """Those that are not of requests waiting here. The others are cancelled once they are submitted."""
        if not self._waiting:
            return list(handles)
        for handle in handles:
            if (request := self._waiting.get(handle)) is not None:
                self._cancels.setdefault(request.handle, set()).add(handle)
        return [handle for handle in handles if handle not in self._waiting]

    def close(self) -> None:
        """The session is over: nobody waits for an answer."""
        for task in self._tasks:
            task.cancel()

    async def _prove(self, request: Request, name: str) -> None:
        error: TokaError | None = None
        try:
            await prove_in_time(self._prover, request, name)
        except TokaError as refused:
            error = refused
        except Exception as broken:  # one request's trouble is not the session's
            log.error("a grammar could not be checked", request_id=request.request_id, exc_info=broken)
            error = Internal.logged()
        for handle in range(request.handle, request.handle + request.n):
            self._waiting.pop(handle, None)
        cancels = self._cancels.pop(request.handle, set())
        if error is None:
            self._engine.submit(request)
            self._engine.cancel(self._sink, sorted(cancels))
        else:
            self._engine.reject(self._sink, request.handle, error)
