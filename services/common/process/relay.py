"""Stdout and stderr of a program that must not wait until somebody reads them.

Whoever reads a log may stall: a terminal that is held, a pager, a log collector behind a pipe. A write to a full pipe
blocks the thread that writes, and that may be the one on which everything runs.
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

_MOST_BYTES = 1024 * 1024  # that wait
_LAST_S = 1.0  # for what still waits at the end

_relays: list["Relay"] = []  # those of this process


def _plainly(lines: int) -> bytes:
    return b"%d lines were dropped, since nobody took them\n" % lines


class Relay(io.RawIOBase):
    """Bytes for ``file``. The caller writes what is taken at once, so that nothing is lost if the process crashes next.
    The rest waits for a thread of its own; what does not fit into the buffer is dropped, and how much is said behind
    it, in the words of ``say_dropped``. Methods may be called by any thread."""

    def __init__(
        self, file: int, most_bytes: int = _MOST_BYTES, say_dropped: Callable[[int], bytes] = _plainly
    ) -> None:
        self.say_dropped = say_dropped
        self._known_as, self._file, self._most_bytes = file, os.dup(file), most_bytes
        self._write_at_once = _never_waiting(self._file)
        self._changed = threading.Condition()  # its lock is that of what follows
        self._waiting = bytearray()
        self._writing = False
        self._dropped = 0  # lines
        threading.Thread(target=self._pass_on, name="relay", daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def fileno(self) -> int:
        return self._known_as

    def write(self, data: "ReadableBuffer") -> int:
        """Takes or drops all of it, and never waits."""
        whole = rest = memoryview(data)
        with self._changed:
            if not (self._waiting or self._writing):
                rest = whole[self._taken_at_once(whole) :]
            too_much = self._waiting and len(self._waiting) + len(rest) > self._most_bytes
            if self._dropped or too_much:
                self._dropped += bytes(rest).count(b"\n")
            elif rest:
                self._waiting += rest
                self._changed.notify_all()
        return len(whole)

    def drain(self, patience_s: float = _LAST_S) -> None:
        """Until all is written, for ``patience_s`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing), patience_s)

    def _taken_at_once(self, data: memoryview) -> int:
        """How many bytes."""
        try:
            return self._write_at_once(data)
        except BlockingIOError:
            return 0
        except OSError:  # nobody will read it any more
            return len(data)

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                data, self._waiting, self._writing = self._waiting, bytearray(), True
                dropped, self._dropped = self._dropped, 0
            if dropped:
                data += (b"" if data.endswith(b"\n") else b"\n") + self.say_dropped(dropped)
            with contextlib.suppress(OSError):  # nobody will read it any more
                while data:
                    try:
                        del data[: os.write(self._file, data)]
                    except BlockingIOError:  # who gave it to us does not wait, either
                        _wait_for_room(self._file)


def _wait_for_room(file: int) -> None:
    room = select.poll()
    room.register(file, select.POLLOUT)
    room.poll()


def _never_waiting(file: int) -> Callable[[memoryview], int]:
    """Writes what ``file`` has room for, and raises ``BlockingIOError`` where that is nothing, or cannot be known."""
    mode = os.fstat(file).st_mode
    if stat.S_ISREG(mode):
        return partial(os.write, file)
    if stat.S_ISSOCK(mode):
        known = socket.socket(fileno=os.dup(file))
        return lambda data: known.send(data, socket.MSG_DONTWAIT)
    try:
        return partial(os.write, _opened_again(file))
    except OSError:
        return _no_room


def _opened_again(file: int) -> int:
    """The same pipe or terminal, for who does not wait. Opened anew: the mode is shared with all who were given it.
    Raises ``OSError``."""
    return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)


def _no_room(_: memoryview) -> int:
    raise BlockingIOError


def relay_output() -> None:
    """From here on nobody waits who writes to this process's stdout and stderr.

    Libraries that are not Python's write past ``sys.stderr``. Pipes and terminals take what they say while there is
    room, and lose it otherwise.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it is closed: what is opened later shall not get its number
            file = os.open(os.devnull, os.O_WRONLY)
        else:
            stream.flush()
            file = stream.fileno()
        _relays.append(Relay(file))
        text = io.TextIOWrapper(
            _relays[-1],  # type: ignore[type-var]  # its types want a name, which it does without
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,
        )
        setattr(sys, name, text)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            with contextlib.suppress(OSError):
                again = _opened_again(file)
                os.dup2(again, file)
                os.close(again)
    atexit.register(last_words)


def say_dropped_with(words: Callable[[int], bytes]) -> None:
    """How this process's relays tell how many lines they dropped."""
    for relay in _relays:
        relay.say_dropped = words


def last_words() -> None:
    """To be called when the process ends: wait a moment until what was said is written."""
    until = time.monotonic() + _LAST_S
    for relay in _relays:
        relay.drain(max(0.0, until - time.monotonic()))
