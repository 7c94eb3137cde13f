"""Controls a child process that compiles grammars."""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Sequence
from typing import NamedTuple

import structlog

from services.common.boundaries import undo_on_error_async
from services.common.errors import Unavailable
from services.common.process.children import module_command, module_environment
from services.common.process.service import PARENT_PID

log = structlog.get_logger(__name__)

_START_S = 120.0  # wall clock; for a large vocabulary on a busy machine
_TIMEOUT_FACTOR = 24  # wall clock to CPU seconds; more time means that the child did not get a processor


class GrammarLimits(NamedTuple):
    """Limits for one grammar."""

    cpu_seconds: float = 0.5  # to its first mask; a worker compiles it again, and a step may wait for it
    memory_bytes: int = 256 * 1024**2  # added to the child's memory; a worker keeps several grammars


class GrammarCompiler:
    """Child process that compiles grammars. Used by one task at a time, on the event loop, until it exits."""

    def __init__(self, process: Process, limits: GrammarLimits) -> None:
        if process.stdin is None or process.stdout is None:
            raise ValueError("the process has no pipes")
        self._process, self._stdin, self._stdout = process, process.stdin, process.stdout
        self._limits = limits

    @classmethod
    async def start(cls, tokenizer: str, eos_token_ids: Sequence[int], limits: GrammarLimits) -> "GrammarCompiler":
        """Start a child. Return it when it is ready. Raises ``Unavailable`` if it cannot start."""
        settings = {"tokenizer": tokenizer, "eos_token_ids": eos_token_ids, **limits._asdict()}
        # The library's panics on stderr contain the caller's text, which must not be logged.
        process = await asyncio.create_subprocess_exec(
            *module_command("services.scheduler.grammar.child", json.dumps(settings)),
            stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            env=module_environment(os.environ) | {PARENT_PID: str(os.getpid())},
        )  # fmt: skip
        compiler = cls(process, limits)
        async with undo_on_error_async(compiler.close):
            try:
                reason = await asyncio.wait_for(compiler._read(), _START_S)
            except (TimeoutError, asyncio.IncompleteReadError):
                raise Unavailable("the process that checks grammars did not start; try again") from None
            if reason:
                raise Unavailable(f"grammars cannot be checked: {reason}")
        return compiler

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def compile(self, grammar: str) -> str:
        """Return why ``grammar`` does not compile, or an empty string. Raises ``Unavailable`` if this is unknown."""
        try:
            self._stdin.write(json.dumps(grammar).encode() + b"\n")
            return await asyncio.wait_for(self._read(), self._limits.cpu_seconds * _TIMEOUT_FACTOR)
        except TimeoutError:
            await self.close()
            raise Unavailable("the check of the grammar got no processor time; try again") from None
        except asyncio.CancelledError:
            await self.close()
            raise
        except (asyncio.IncompleteReadError, ConnectionError):
            return self._exit_reason(await self._process.wait())

    async def close(self) -> None:
        """Kill the child."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> str:
        text: str = json.loads(await self._stdout.readuntil())
        return text

    def _exit_reason(self, status: int) -> str:
        log.warning("a process that checks grammars exited", exit_status=status)
        match -status:
            case signal.SIGPROF:
                return f"it takes more than {self._limits.cpu_seconds:g} s to compile"
            case signal.SIGABRT | signal.SIGSEGV | signal.SIGBUS | signal.SIGILL:
                return f"it takes more than {self._limits.memory_bytes >> 20} MiB to compile, or is nested too deeply"
        raise Unavailable("the process that checks grammars exited; try again")
