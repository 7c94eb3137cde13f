"""A TCP proxy that damages the bytes of a link for a while: see ``FAULTS``."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Literal, get_args

Fault = Literal["stall", "one_way", "half_close", "halve", "drop", "garble", "wedge"]
"""
stall: bytes are held in both directions and forwarded after the fault. one_way: the same, for replies only.
half_close: the direction of replies is closed, the other one stays open. halve: the second half of each chunk is lost.
drop: every second chunk on average is lost. garble: bytes are replaced by random ones, at least one of each chunk.
wedge: connections that are open when the fault begins stay open, and carry no bytes even after the fault.
"""
FAULTS: tuple[Fault, ...] = get_args(Fault)
SILENT: tuple[Fault, ...] = ("halve", "drop", "garble")
"""Faults that change what arrives. Only TLS can detect each of them."""

_CHUNK = 64 * 1024
_GARBLED = 0.05  # share of bytes


class Proxy:
    """A listener that forwards each connection to one target. Runs on one event loop."""

    def __init__(self, target: str, seed: int = 0) -> None:
        """``target``: ``host:port``. ``seed``: decides which bytes are damaged."""
        self.target = target
        self.connections = 0  # accepted so far
        self._chance = random.Random(seed)
        self._fault: Fault | None = None
        self._healed = asyncio.Event()
        self._healed.set()
        self._replies: set[asyncio.StreamWriter] = set()  # to the clients of open connections
        self._wedged: set[asyncio.StreamWriter] = set()  # those of them that carry no more bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        """Listen at ``address``. Returns the real address."""
        host, _, port = address.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the listener and all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def strike(self, fault: Fault) -> None:
        """Begin ``fault``, on open connections and on new ones."""
        self._fault = fault
        self._healed.clear()
        if fault == "half_close":
            for writer in self._replies:
                _close_write(writer)
        if fault == "wedge":
            self._wedged |= self._replies

    def heal(self) -> None:
        """Forward all bytes unchanged from now on. Lost bytes and closed connections are not restored."""
        self._fault = None
        self._healed.set()

    @contextlib.asynccontextmanager
    async def struck(self, fault: Fault, seconds: float) -> AsyncIterator[None]:
        """Strike on entry, and heal ``seconds`` later or at the end of the block, whichever is later."""
        self.strike(fault)
        over = asyncio.create_task(asyncio.sleep(seconds))
        try:
            yield
            await over
        finally:
            over.cancel()
            self.heal()

    async def _accept(self, client_reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        server: asyncio.StreamWriter | None = None
        try:
            if self._fault == "stall":
                await self._healed.wait()
            host, _, port = self.target.rpartition(":")
            server_reader, server = await asyncio.open_connection(host, int(port))
            self._replies.add(client)
            if self._fault == "half_close":
                _close_write(client)
            async with asyncio.TaskGroup() as directions:
                directions.create_task(self._forward(client_reader, server, client, replies=False))
                directions.create_task(self._forward(server_reader, client, client, replies=True))
        except* OSError:
            pass
        except* asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            self._replies.discard(client)
            self._wedged.discard(client)
            for writer in (client, server):
                if writer is not None:
                    writer.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: asyncio.StreamWriter,
        *,
        replies: bool,
    ) -> None:
        """Forward one direction of ``connection`` until its end. A connection that breaks ends both directions."""
        while data := await reader.read(_CHUNK):
            if connection in self._wedged:
                continue
            if self._fault == "stall" or (self._fault == "one_way" and replies):
                await self._healed.wait()
            if data := self._damage(data):
                with contextlib.suppress(RuntimeError):  # closed by ``half_close``
                    writer.write(data)
                    await writer.drain()
        _close_write(writer)

    def _damage(self, data: bytes) -> bytes:
        match self._fault:
            case "halve":
                return data[: len(data) // 2]
            case "drop":
                return b"" if self._chance.random() < 0.5 else data
            case "garble":
                garbled = bytearray(data)
                for index in range(len(garbled)):
                    if self._chance.random() < _GARBLED:
                        garbled[index] = self._chance.randrange(256)
                garbled[self._chance.randrange(len(garbled))] ^= 1 + self._chance.randrange(255)
                return bytes(garbled)
            case _:
                return data


def _close_write(writer: asyncio.StreamWriter) -> None:
    if writer.can_write_eof() and not writer.is_closing():
        with contextlib.suppress(OSError):
            writer.write_eof()
