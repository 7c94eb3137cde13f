"""Contents of files: on this host's disk, or wherever fsspec reaches."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import fsspec

from services.common.errors import Internal, Unavailable

BLOCK_BYTES = 1024 * 1024
_THREADS = 4

R = TypeVar("R")


class Blobs:
    """Blobs by name. Blocking work is done in threads of its own."""

    def __init__(self, url: str) -> None:
        """``url``: a directory, or what fsspec takes. Raises ``Unavailable`` if nothing can be written there."""
        try:
            self._fs, self._root = fsspec.core.url_to_fs(os.path.expanduser(url))
            self._fs.makedirs(self._root, exist_ok=True)
            probe = f"{self._root}/.writable-{os.getpid()}"
            self._fs.pipe_file(probe, b"")
            self._fs.rm_file(probe)
        except (OSError, ValueError, ImportError) as error:
            raise Unavailable(f"nothing can be written to store_dir={url}: {error}") from error
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="blobs")

    async def create(self, name: str) -> "BlobWriter":
        """A new blob; it is there once it is closed."""
        return BlobWriter(self, await self.in_thread(self._fs.open, self._path(name), "wb"))

    async def stream(self, name: str, block_bytes: int = BLOCK_BYTES) -> AsyncGenerator[bytes, None]:
        """Yield the content in blocks of ``block_bytes``. The next one is read when it is asked for."""
        file = await self.in_thread(self._open, name)
        try:
            while block := await self.in_thread(file.read, block_bytes):
                yield block
        finally:
            await self.in_thread(file.close)

    async def read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each (offset, length)."""
        return await self.in_thread(self._read_ranges, name, ranges)

    async def delete(self, name: str) -> None:
        """Whether it is there or not."""
        with contextlib.suppress(FileNotFoundError):
            await self.in_thread(self._fs.rm_file, self._path(name))

    async def in_thread(self, work: Callable[..., R], *arguments: Any) -> R:
        """``work(*arguments)`` in one of the threads; what the file system refuses as ``Unavailable``."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unavailable(f"the store's files cannot be read or written: {error}") from error

    def stop(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _open(self, name: str) -> Any:
        try:
            return self._fs.open(self._path(name), "rb")
        except FileNotFoundError as error:
            raise Internal("the content of the file is missing in the store") from error

    def _read_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._open(name) as file:
            parts = []
            for offset, length in ranges:
                file.seek(offset)
                parts.append(file.read(length))
        return parts


class BlobWriter:
    """Collects what is written, so that a thread is asked once for a block."""

    def __init__(self, blobs: Blobs, file: Any) -> None:
        self.bytes = 0
        self._blobs = blobs
        self._file = file
        self._parts: list[bytes] = []
        self._held = 0

    async def write(self, data: bytes) -> None:
        """Append ``data``."""
        self._parts.append(data)
        self._held += len(data)
        self.bytes += len(data)
        if self._held >= BLOCK_BYTES:
            await self._flush()

    async def close(self) -> None:
        """Write the rest; from then on it outlives this host's power, too."""
        await self._flush()
        await self._blobs.in_thread(self._sync_and_close)

    async def abandon(self) -> None:
        """Close it as it is: nobody will read it."""
        self._parts.clear()
        with contextlib.suppress(Exception):
            await self._blobs.in_thread(self._file.close)

    async def _flush(self) -> None:
        block, self._parts, self._held = b"".join(self._parts), [], 0
        await self._blobs.in_thread(self._file.write, block)

    def _sync_and_close(self) -> None:
        self._file.flush()
        with contextlib.suppress(AttributeError, OSError):  # remote files have no number
            os.fsync(self._file.fileno())
        self._file.close()
