"""Proves that grammars compile before their requests are queued, away from everything that others wait for."""

import asyncio
import hashlib
from collections import OrderedDict

import structlog

from services.common.errors import InvalidRequest, Overloaded, TokaError, Unavailable
from services.scheduler.grammar.compiler import Compiler, Limits
from services.scheduler.grammar.message import FIELD

log = structlog.get_logger(__name__)

_COMPILERS = 2  # a grammar that takes its whole time does not hold up the next one
_KNOWN = 8192  # grammars whose outcome is kept
_MOST_UNPROVEN = 1024  # different ones that may wait


class Prover:
    """Owned by the asyncio loop. Children start with the first grammars that come.

    ``tokenizer``: a directory, a hub id, or ``builtin``.
    """

    def __init__(self, tokenizer: str, eos_token_ids: list[int], limits: Limits | None = None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._limits = limits or Limits()
        self._known: OrderedDict[bytes, str] = OrderedDict()  # hash -> why it does not compile, or ""
        self._running: dict[bytes, asyncio.Task[str]] = {}
        self._room = asyncio.Semaphore(_COMPILERS)
        self._idle: list[Compiler] = []
        self._busy: set[Compiler] = set()

    def knows(self, grammar: str) -> bool:
        """``prove`` will not have to wait."""
        return _key(grammar) in self._known

    async def prove(self, grammar: str, name: str) -> None:
        """Raises ``InvalidRequest`` with the reason why ``grammar``, called ``name`` in it, does not compile within the
        limits; ``Overloaded`` and ``Unavailable`` when it cannot be found out now. Who asks for the same one waits for
        the same answer; who does not wait any longer changes nothing."""
        key = _key(grammar)
        reason = self._known.get(key)
        if reason is None:
            task = self._running.get(key)
            if task is None:
                task = self._begin(key, grammar)
            try:
                reason = await asyncio.shield(task)
            except asyncio.CancelledError:
                if not task.cancelled():
                    raise
                raise Unavailable("the scheduler is shutting down") from None
        else:
            self._known.move_to_end(key)
        if reason:
            raise InvalidRequest(f"{name} cannot be followed: {reason}", field=FIELD, reason="INVALID_GRAMMAR")

    async def close(self) -> None:
        """End the children. Who still waits gets ``Unavailable``."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for compiler in [*self._idle, *self._busy]:
            await compiler.close()
        self._idle.clear()

    def _begin(self, key: bytes, grammar: str) -> asyncio.Task[str]:
        if len(self._running) >= _MOST_UNPROVEN:
            raise Overloaded(
                f"{len(self._running)} grammars wait to be checked; send this one later",
                retry_after_s=1.0,
                reason="GRAMMARS_WAIT",
            )
        task = self._running[key] = asyncio.create_task(self._run(key, grammar))
        task.add_done_callback(lambda task: self._ended(key, task))
        return task

    def _ended(self, key: bytes, task: asyncio.Task[str]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen, also when nobody waits any longer

    async def _run(self, key: bytes, grammar: str) -> str:
        async with self._room:
            reason = await self._compile(grammar)
        self._known[key] = reason
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return reason

    async def _compile(self, grammar: str) -> str:
        compiler = self._idle.pop() if self._idle else None
        if compiler is None or not compiler.alive:
            compiler = await Compiler.start(self._tokenizer, self._eos_token_ids, self._limits)
        self._busy.add(compiler)
        try:
            return await compiler.compile(grammar)
        except TokaError as error:
            log.warning("a grammar could not be checked", reason=error.message)
            raise
        finally:
            self._busy.discard(compiler)
            if compiler.alive:
                self._idle.append(compiler)
            else:
                log.warning("a process that checks grammars was ended")


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
