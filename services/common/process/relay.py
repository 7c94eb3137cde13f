"""Writes stdout and stderr of a service without blocking.

A log consumer may stall: a paused terminal, a pager, a log collector behind a pipe. A write to a full pipe blocks the
calling thread, which may be the thread of the event loop.
"""

import atexit
import contextlib
import io
import os
import select
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MOST_BYTES = 1024 * 1024  # of buffered output
_FLUSH_S = 1.0  # limit for writing buffered output at exit

_relays: list["Relay"] = []  # of this process's stdout and stderr


def _format_dropped(lines: int) -> bytes:
    return b"%d lines were dropped because the log consumer stalled\n" % lines


class Relay(io.RawIOBase):
    """Stream that writes to ``file`` and never blocks the caller. Methods may be called by any thread.

    The caller's thread writes the bytes that ``file`` accepts at once, so that they are not lost if the process crashes
    next. A separate thread writes the rest. Output that does not fit into the buffer is dropped, and ``format_dropped``
    makes the message that reports the number of dropped lines.
    """

    def __init__(
        self, file: int, most_bytes: int = _MOST_BYTES, format_dropped: Callable[[int], bytes] = _format_dropped
    ) -> None:
        self.format_dropped = format_dropped
        self._known_as, self._file, self._most_bytes = file, os.dup(file), most_bytes
        self._write_at_once = _nonblocking_write(self._file)
        self._changed = threading.Condition()  # its lock protects the fields below
        self._buffer = bytearray()
        self._writing = False
        self._dropped = 0  # lines
        threading.Thread(target=self._write_buffered, name="relay", daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def fileno(self) -> int:
        return self._known_as

    def write(self, data: "ReadableBuffer") -> int:
        """Write, buffer or drop all of ``data`` without blocking. Return its length."""
        whole = rest = memoryview(data)
        with self._changed:
            if not (self._buffer or self._writing):
                rest = whole[self._write_now(whole) :]
            overflows = self._buffer and len(self._buffer) + len(rest) > self._most_bytes
            if self._dropped or overflows:
                self._dropped += bytes(rest).count(b"\n")
            elif rest:
                self._buffer += rest
                self._changed.notify_all()
        return len(whole)

    def drain(self, timeout_s: float = _FLUSH_S) -> None:
        """Block until the buffer is written, at most ``timeout_s`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._buffer or self._writing), timeout_s)

    def _write_now(self, data: memoryview) -> int:
        """Write the bytes that the file accepts now. Return their number."""
        try:
            return self._write_at_once(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader closed the file
            return len(data)

    @property
    def buffered(self) -> int:
        """Number of bytes that the thread has not begun to write."""
        return len(self._buffer)

    def _write_buffered(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._buffer)
                data, self._buffer, self._writing = self._buffer, bytearray(), True
                dropped, self._dropped = self._dropped, 0
            if dropped:
                data += (b"" if data.endswith(b"\n") else b"\n") + self.format_dropped(dropped)
            with contextlib.suppress(OSError):  # the reader closed the file
                while data:
                    try:
                        del data[: os.write(self._file, data)]
                    except BlockingIOError:  # the file itself is in non-blocking mode
                        _wait_for_room(self._file)


def _wait_for_room(file: int) -> None:
    room = select.poll()
    room.register(file, select.POLLOUT)
    room.poll()


def _nonblocking_write(file: int) -> Callable[[memoryview], int]:
    """Return a function that writes the bytes for which ``file`` has room.

    It raises ``BlockingIOError`` if there is no room, or if this cannot be known.
    """
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return partial(os.write, file)
    if stat.S_ISSOCK(mode):
        known = socket.socket(fileno=os.dup(file))
        return lambda data: known.send(data, socket.MSG_DONTWAIT)
    try:
        return partial(os.write, _reopen(file))
    except OSError:
        return _no_room


def _reopen(file: int) -> int:
    """Open the same pipe or terminal again in non-blocking mode. Raises ``OSError``.

    The mode of the original descriptor is shared with all processes that inherited it.
    """
    return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _no_room(_: memoryview) -> int:
    raise BlockingIOError


def relay_output() -> None:
    """Make writes to this process's stdout and stderr non-blocking from now on.

    Libraries in other languages write to the descriptors and not to ``sys.stderr``. Their output to pipes and terminals
    is lost while there is no room.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed: a file opened later must not get its number
            file = os.open(os.devnull, os.O_WRONLY)
        else:
            stream.flush()
            file = stream.fileno()
        _relays.append(Relay(file))
        text = io.TextIOWrapper(
            _relays[-1],  # type: ignore[type-var]  # the type stub requires a name, TextIOWrapper does not
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, text)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            with contextlib.suppress(OSError):
                reopened = _reopen(file)
                os.dup2(reopened, file)
                os.close(reopened)
    atexit.register(flush_output)


def set_drop_message(format_dropped: Callable[[int], bytes]) -> None:
    """Set the function that formats the message about dropped lines."""
    for relay in _relays:
        relay.format_dropped = format_dropped


def flush_output() -> None:
    """Block until buffered output is written, at most one second. Called before the process exits."""
    until = time.monotonic() + _FLUSH_S
    for relay in _relays:
        relay.drain(max(0.0, until - time.monotonic()))
