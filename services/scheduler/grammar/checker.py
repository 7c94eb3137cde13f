"""Checks in child processes that grammars compile, before their requests are queued."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import lru_cache, partial

import structlog

from services.common.boundaries import errors_to
from services.common.errors import InvalidRequest, Overloaded, Unavailable
from services.scheduler.grammar.compiler import GrammarCompiler, GrammarLimits
from services.scheduler.grammar.fair_queue import FairQueue
from services.scheduler.grammar.message import FIELD

log = structlog.get_logger(__name__)

_COMPILERS = 2  # so that a grammar that takes its whole time does not delay the next one
_KNOWN = 8192  # cached outcomes
_MOST_UNCHECKED = 2048  # different grammars that may wait
_MOST_OF_CLIENT = 1024  # grammars of one client that may wait


class _Check:
    """Check of one grammar."""

    def __init__(self, key: bytes, grammar: str) -> None:
        self.key = key
        self.grammar = grammar
        self.waiters = 0
        self.running = False
        self.outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class GrammarChecker:
    """Checks grammars for all clients, on the event loop. Children start with the first grammars.

    ``tokenizer`` is a directory, a hub id, or the name of a built-in model.
    """

    def __init__(self, tokenizer: str, eos_token_ids: Sequence[int], limits: GrammarLimits | None = None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._limits = limits or GrammarLimits()
        self._known: OrderedDict[bytes, str] = OrderedDict()  # hash -> why it does not compile, or ""
        self._checks: dict[bytes, _Check] = {}  # queued or running
        self._queue: FairQueue[_Check] = FairQueue()
        self._running: set[asyncio.Task[None]] = set()
        self._idle: list[GrammarCompiler] = []
        self._busy: set[GrammarCompiler] = set()

    def is_cached(self, grammar: str) -> bool:
        """Return whether the outcome is cached, so that ``check`` returns at once."""
        return _key(grammar) in self._known

    async def check(self, grammar: str, name: str, client: Hashable = None) -> None:
        """Check that ``grammar``, called ``name`` in errors, can be used within the limits.

        Clients take turns. Callers with the same grammar share a check. A check without callers is not started. Raises
        ``InvalidRequest`` with the reason why the grammar cannot be used, and ``Overloaded`` and ``Unavailable`` if it
        cannot be checked now.
        """
        key = _key(grammar)
        reason = self._known.get(key)
        if reason is None:
            reason = await self._outcome(key, grammar, client)
        else:
            self._known.move_to_end(key)
        if reason:
            raise InvalidRequest(f"{name} cannot be followed: {reason}", field=FIELD, reason="INVALID_GRAMMAR")

    async def close(self) -> None:
        """Kill the children. Waiting callers get ``Unavailable``."""
        for check in self._checks.values():
            self._queue.drop(check)
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for check in self._checks.values():
            _fail(check, Unavailable("the scheduler is shutting down"))
        self._checks.clear()
        for compiler in [*self._idle, *self._busy]:
            await compiler.close()
        self._idle.clear()

    async def _outcome(self, key: bytes, grammar: str, client: Hashable) -> str:
        check = self._checks.get(key)
        if check is None or not check.running:
            self._check_capacity(client, new=check is None)
        if check is None:
            check = self._checks[key] = _Check(key, grammar)
        check.waiters += 1
        if not check.running:
            self._queue.put(client, check)
            self._run_next()
        try:
            return await asyncio.shield(check.outcome)
        finally:
            check.waiters -= 1
            # A running check continues, since it ends earlier than a new child could start.
            if not check.waiters and not check.running and self._checks.get(key) is check:
                self._queue.drop(check)
                del self._checks[key]

    def _check_capacity(self, client: Hashable, *, new: bool) -> None:
        own = self._queue.waiting(client)
        if own < _MOST_OF_CLIENT and (len(self._checks) < _MOST_UNCHECKED or not new):
            return
        raise Overloaded(
            f"{len(self._checks)} grammars wait to be checked, {own} of them for this client; send this request later",
            retry_after_s=1.0,
            reason="GRAMMARS_WAIT",
        )

    def _run_next(self) -> None:
        while len(self._running) < _COMPILERS and (check := self._queue.take()) is not None:
            check.running = True
            task = asyncio.create_task(self._run(check))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._run_next()

    async def _run(self, check: _Check) -> None:
        with errors_to(partial(_not_checked, check)):
            reason = await self._compile(check.grammar)
            self._known[check.key] = reason
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
            check.outcome.set_result(reason)
        del self._checks[check.key]

    async def _compile(self, grammar: str) -> str:
        compiler = self._idle.pop() if self._idle else None
        if compiler is None or not compiler.alive:
            compiler = await GrammarCompiler.start(self._tokenizer, self._eos_token_ids, self._limits)
        self._busy.add(compiler)
        try:
            return await compiler.compile(grammar)
        finally:
            self._busy.discard(compiler)
            if compiler.alive:
                self._idle.append(compiler)


def _not_checked(check: _Check, error: Exception) -> None:
    log.warning("a grammar could not be checked", reason=str(error))
    _fail(check, error)


def _fail(check: _Check, error: Exception) -> None:
    if not check.outcome.done():
        check.outcome.set_exception(error)
        check.outcome.exception()  # marks it as retrieved


@lru_cache(maxsize=64)  # requests with the same grammar share the text object, whose hash is cached
def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
