"""Proves that grammars compile before their requests are queued, away from everything that others wait for."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import lru_cache

import structlog

from services.common.errors import InvalidRequest, Overloaded, Unavailable
from services.scheduler.grammar.compiler import Compiler, Limits
from services.scheduler.grammar.message import FIELD
from services.scheduler.grammar.turns import Turns

log = structlog.get_logger(__name__)

_COMPILERS = 2  # a grammar that takes its whole time does not hold up the next one
_KNOWN = 8192  # grammars whose outcome is kept
_MOST_UNPROVEN = 2048  # different ones that may wait
_MOST_OF_ONE = 1024  # and for one client


class _Proof:
    """One grammar that somebody waits for."""

    def __init__(self, key: bytes, grammar: str) -> None:
        self.key = key
        self.grammar = grammar
        self.waiters = 0
        self.running = False
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Prover:
    """Owned by the asyncio loop. Children start with the first grammars that come.

    ``tokenizer``: a directory, a hub id, or ``builtin``.
    """

    def __init__(self, tokenizer: str, eos_token_ids: Sequence[int], limits: Limits | None = None) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._limits = limits or Limits()
        self._known: OrderedDict[bytes, str] = OrderedDict()  # hash -> why it does not compile, or ""
        self._proofs: dict[bytes, _Proof] = {}  # that wait or run
        self._turns: Turns[_Proof] = Turns()
        self._running: set[asyncio.Task[None]] = set()
        self._idle: list[Compiler] = []
        self._busy: set[Compiler] = set()

    def knows(self, grammar: str) -> bool:
        """``prove`` will not have to wait."""
        return _key(grammar) in self._known

    async def prove(self, grammar: str, name: str, client: Hashable = None) -> None:
        """Raises ``InvalidRequest`` with the reason why ``grammar``, called ``name`` in it, cannot be followed within
        the limits; ``Overloaded`` and ``Unavailable`` when it cannot be found out now. Clients take turns. Who
        asks for the same one waits for the same answer; what nobody waits for any longer is not begun."""
        key = _key(grammar)
        reason = self._known.get(key)
        if reason is None:
            reason = await self._answer(key, grammar, client)
        else:
            self._known.move_to_end(key)
        if reason:
            raise InvalidRequest(f"{name} cannot be followed: {reason}", field=FIELD, reason="INVALID_GRAMMAR")

    async def close(self) -> None:
        """End the children. Who still waits gets ``Unavailable``."""
        for proof in self._proofs.values():
            self._turns.drop(proof)
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for proof in self._proofs.values():
            _fail(proof, Unavailable("the scheduler is shutting down"))
        self._proofs.clear()
        for compiler in [*self._idle, *self._busy]:
            await compiler.close()
        self._idle.clear()

    async def _answer(self, key: bytes, grammar: str, client: Hashable) -> str:
        proof = self._proofs.get(key)
        if proof is None or not proof.running:
            self._check_room(client, new=proof is None)
        if proof is None:
            proof = self._proofs[key] = _Proof(key, grammar)
        proof.waiters += 1
        if not proof.running:
            self._turns.put(client, proof)
            self._run_next()
        try:
            return await asyncio.shield(proof.answer)
        finally:
            proof.waiters -= 1
            # One that runs goes on: it is done before another child would have started in place of a killed one.
            if not proof.waiters and not proof.running and self._proofs.get(key) is proof:
                self._turns.drop(proof)
                del self._proofs[key]

    def _check_room(self, client: Hashable, *, new: bool) -> None:
        own = self._turns.waiting(client)
        if own < _MOST_OF_ONE and (len(self._proofs) < _MOST_UNPROVEN or not new):
            return
        raise Overloaded(
            f"{len(self._proofs)} grammars wait to be checked, {own} of them for this client; send this one later",
            retry_after_s=1.0,
            reason="GRAMMARS_WAIT",
        )

    def _run_next(self) -> None:
        while len(self._running) < _COMPILERS and (proof := self._turns.take()) is not None:
            proof.running = True
            task = asyncio.create_task(self._run(proof))
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._run_next()

    async def _run(self, proof: _Proof) -> None:
        try:
            reason = await self._compile(proof.grammar)
        except Exception as error:
            log.warning("a grammar could not be checked", reason=str(error))
            _fail(proof, error)
        else:
            self._known[proof.key] = reason
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
            proof.answer.set_result(reason)
        del self._proofs[proof.key]

    async def _compile(self, grammar: str) -> str:
        compiler = self._idle.pop() if self._idle else None
        if compiler is None or not compiler.alive:
            compiler = await Compiler.start(self._tokenizer, self._eos_token_ids, self._limits)
        self._busy.add(compiler)
        try:
            return await compiler.compile(grammar)
        finally:
            self._busy.discard(compiler)
            if compiler.alive:
                self._idle.append(compiler)


def _fail(proof: _Proof, error: Exception) -> None:
    if not proof.answer.done():
        proof.answer.set_exception(error)
        proof.answer.exception()  # seen, also when nobody waits any longer


@lru_cache(maxsize=64)  # a text that comes with many requests is one object: its hash is known
def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode()).digest()
