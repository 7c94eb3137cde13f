"""Starts the engine as child processes with ``toka gateways=0``. They end with this process."""

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

from services.common.boundaries import undo_on_error_async
from services.common.config import DeploymentConfig
from services.common.errors import InvalidRequest, Unavailable
from services.common.flags import ENV_PREFIX, FlagError, as_text, load
from services.common.process.children import module_command, module_environment
from services.common.process.service import PARENT_PID

_ADDRESSES = "scheduler_addresses="
_STOP_S = 30.0
_LONGEST_LINE = 1024 * 1024
_LAST_LINES = 20


class EngineProcess:
    """A running engine, made by ``start`` and used on one event loop.

    The thread of the event loop must run as long as the engine, because Linux ends the children with the thread.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.addresses: list[str] = []
        self._process = process
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._reading: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, flags: Mapping[str, Any]) -> "EngineProcess":
        """Start an engine with ``flags`` of ``toka``, and return it when it serves.

        Raises ``InvalidRequest`` for a wrong flag, and ``Unavailable`` with the last log lines if the engine fails.
        """
        arguments = _arguments({"log_level": "ERROR", "grpc_port": 0, "gateways": 0, **flags})
        inherited = module_environment(os.environ)
        environment = {name: value for name, value in inherited.items() if not name.startswith(ENV_PREFIX)}
        process = await asyncio.create_subprocess_exec(
            *module_command("services.launcher.toka", *arguments),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env=environment | {PARENT_PID: str(os.getpid())}, start_new_session=True, limit=_LONGEST_LINE,
        )  # fmt: skip
        engine = cls(process)
        async with undo_on_error_async(engine.stop):
            await engine._wait_until_it_serves()
        return engine

    @property
    def trouble(self) -> str:
        """Reason why the engine has ended, with its last log lines, or empty while it runs."""
        if self._process.returncode is None:
            return ""
        last = "".join(f"\n  {line}" for line in self._last_lines)
        return f"the engine ended with exit status {self._process.returncode}{last}"

    async def ended(self) -> None:
        """Wait until the engine has ended."""
        await self._process.wait()

    async def stop(self) -> None:
        """End the engine and its children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._process.kill()  # and Linux ends its children
            await self._process.wait()
        await asyncio.gather(*self._reading)

    async def _wait_until_it_serves(self) -> None:
        stdout, errors = self._process.stdout, self._process.stderr
        assert stdout is not None  # ``start`` made pipes
        assert errors is not None
        stderr = asyncio.create_task(self._forward(errors))
        self._reading.append(stderr)
        async for line in stdout:
            text = line.decode(errors="replace").strip()
            if text.startswith(_ADDRESSES):
                self.addresses = text.removeprefix(_ADDRESSES).split(",")
                self._reading.append(asyncio.create_task(_discard(stdout)))
                return
        await self._process.wait()
        await stderr
        raise Unavailable(self.trouble)

    async def _forward(self, stderr: asyncio.StreamReader) -> None:
        """Copy the engine's log to stderr, and keep its last lines for ``trouble``."""
        async for line in stderr:
            text = line.decode(errors="replace")
            self._last_lines.append(text.rstrip())
            with contextlib.suppress(ValueError, OSError):  # the caller has closed stderr
                sys.stderr.write(text)


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    """Return ``flags`` as a command line. Raises ``InvalidRequest`` for flags that ``toka`` rejects."""
    arguments = [f"{name}={as_text(value)}" for name, value in flags.items() if value is not None]
    try:
        load(DeploymentConfig, arguments, {})
    except FlagError as error:
        raise InvalidRequest(str(error)) from None
    if flags["gateways"]:
        raise InvalidRequest(f"flag gateways={flags['gateways']}: an LLM has no gateway; start toka for an HTTP server")
    return arguments


async def _discard(stdout: asyncio.StreamReader) -> None:
    async for _ in stdout:
        pass
