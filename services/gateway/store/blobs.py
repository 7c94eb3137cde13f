"""Contents of files, on a local disk or on any storage that fsspec supports."""

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec

from services.common.errors import Internal, StoreUnavailable
from services.gateway.engine.metrics import StoreProblem
from services.gateway.store.health import StoreHealth

BLOCK_BYTES = 1024 * 1024
_THREADS = 4
_PROBLEMS: dict[int, StoreProblem] = {
    errno.ENOSPC: "full",
    errno.EDQUOT: "full",
    errno.EROFS: "read_only",
    errno.EACCES: "read_only",
    errno.EPERM: "read_only",
    errno.ENOENT: "missing",
    errno.ENOTDIR: "missing",
}

R = TypeVar("R")


class Blobs:
    """Blobs by name. Blocking work runs in a thread pool. Methods raise ``StoreUnavailable``."""

    def __init__(self, url: str, health: StoreHealth | None = None) -> None:
        """Open the directory or the fsspec URL ``url``. Raises ``StoreUnavailable`` if it cannot be written."""
        self._health = health or StoreHealth()
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
            self._fs.makedirs(self._root, exist_ok=True)
            probe = f"{self._root}/.writable-{os.getpid()}"
            self._fs.pipe_file(probe, b"")
            self._fs.rm_file(probe)
        except (OSError, ValueError, ImportError) as error:
            problem = _problem_of(error) if isinstance(error, OSError) else "error"
            message = f"nothing can be written to store_dir={url}: {error}"
            raise self._health.record_problem("files", problem, message, writing=True) from error
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blobs")

    async def create(self, name: str) -> "BlobWriter":
        """Return a writer for a new blob. The blob can be read after the writer is closed."""
        return BlobWriter(self, await self.in_thread(self._create, name, writing=True))

    async def stream(self, name: str, block_bytes: int = BLOCK_BYTES) -> AsyncGenerator[bytes, None]:
        """Yield the content in blocks of ``block_bytes``, each read on demand."""
        async with self.reading(name) as file:
            while block := await self.in_thread(file.read, block_bytes):
                yield block

    @contextlib.asynccontextmanager
    async def reading(self, name: str) -> AsyncIterator[Any]:
        """Open a blob as a file. Its methods block: call them with ``in_thread``."""
        file = await self.in_thread(self._open, name)
        try:
            yield file
        finally:
            await self.in_thread(file.close)

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each (offset, length)."""
        return await self.in_thread(self._read_ranges, name, ranges)

    async def delete(self, name: str) -> None:
        """Delete a blob. Do nothing if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            await self.in_thread(self._fs.rm_file, self._path(name))

    async def in_thread(self, work: Callable[..., R], *arguments: Any, writing: bool = False) -> R:
        """Return ``work(*arguments)``, computed in a thread. Raises ``StoreUnavailable`` for an ``OSError``."""
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except FileNotFoundError:
            raise
        except OSError as error:
            message = f"the store's files cannot be read or written ({error}); see store_dir={self._root}"
            raise self._health.record_problem("files", _problem_of(error), message, writing=writing) from error
        self._health.record_success("files", writing=writing)
        return done

    def stop(self) -> None:
        """Stop the thread pool without waiting."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _create(self, name: str) -> Any:
        try:
            return self._fs.open(self._path(name), "wb")
        except FileNotFoundError as error:
            raise self._gone() from error

    def _open(self, name: str) -> Any:
        try:
            return self._fs.open(self._path(name), "rb")
        except FileNotFoundError as error:
            if not self._fs.exists(self._root):
                raise self._gone() from error
            raise Internal("the content of the file is missing in the store") from error

    def _gone(self) -> StoreUnavailable:
        message = f"the directory {self._root} is gone; put it back, or start the gateway again with an empty store"
        return self._health.record_problem("files", "missing", message, writing=False)

    def _read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._open(name) as file:
            parts = []
            for offset, length in ranges:
                file.seek(offset)
                parts.append(file.read(length))
        return parts


class BlobWriter:
    """A buffered writer of a blob. Each block is written by one call in a thread."""

    def __init__(self, blobs: Blobs, file: Any) -> None:
        self.bytes = 0
        self._blobs = blobs
        self._file = file
        self._parts: list[bytes] = []
        self._buffered = 0

    async def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._parts.append(data)
        self._buffered += len(data)
        self.bytes += len(data)
        if self._buffered >= BLOCK_BYTES:
            await self._flush()

    async def close(self) -> None:
        """Write the rest, and sync it to disk so that it survives a power failure."""
        await self._flush()
        await self._blobs.in_thread(self._sync_and_close, writing=True)

    async def abandon(self) -> None:
        """Close an incomplete blob without writing the rest."""
        self._parts.clear()
        with contextlib.suppress(Exception):
            await self._blobs.in_thread(self._file.close)

    async def _flush(self) -> None:
        block, self._parts, self._buffered = b"".join(self._parts), [], 0
        await self._blobs.in_thread(self._file.write, block, writing=True)

    def _sync_and_close(self) -> None:
        self._file.flush()
        with contextlib.suppress(AttributeError, OSError):  # remote files have no file descriptor
            os.fsync(self._file.fileno())
        self._file.close()


def _problem_of(error: OSError) -> StoreProblem:
    return _PROBLEMS.get(error.errno or 0, "error")
