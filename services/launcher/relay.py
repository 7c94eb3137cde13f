"""Stderr, for who must not wait until somebody reads it."""

import atexit
import io
import json
import os
import sys
import threading

_MOST_BYTES = 1024 * 1024  # that wait
_LAST_S = 2.0  # for what still waits at the end


class Relay(io.RawIOBase):
    """Bytes for ``file``, written by a thread of its own. A terminal that is held, or a connection to it that hangs,
    takes nothing for hours: what does not fit into the buffer meanwhile is dropped, and how much is said behind it.
    Methods may be called by any thread."""

    def __init__(self, file: int, most_bytes: int = _MOST_BYTES) -> None:
        self._file, self._most_bytes = file, most_bytes
        self._changed = threading.Condition()  # its lock is that of what follows
        self._waiting = bytearray()
        self._writing = False
        self._dropped = 0  # lines
        threading.Thread(target=self._pass_on, name="stderr", daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def fileno(self) -> int:
        return self._file

    def write(self, data: bytes) -> int:
        """Takes or drops all of it, and never waits."""
        with self._changed:
            if len(self._waiting) + len(data) > self._most_bytes:
                self._dropped += bytes(data).count(b"\n")
            else:
                self._waiting += data
                self._changed.notify_all()
        return len(data)

    def drain(self, patience_s: float = _LAST_S) -> None:
        """Until all is written, for ``patience_s`` seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._waiting or self._writing), patience_s)

    def _pass_on(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                data, self._waiting, self._writing = self._waiting, bytearray(), True
                if self._dropped:
                    data += _note(self._dropped)
                    self._dropped = 0
            try:
                while data:
                    del data[: os.write(self._file, data)]
            except OSError:  # nobody will read it any more
                pass


def _note(dropped: int) -> bytes:
    event = "lines were dropped, since nobody took them"
    return json.dumps({"lines": dropped, "event": event, "service": "toka", "level": "warning"}).encode() + b"\n"


def relay_stderr() -> None:
    """From here on whoever writes to this process's ``sys.stderr`` does not wait."""
    relay = Relay(sys.stderr.fileno())
    sys.stderr = io.TextIOWrapper(relay, encoding="utf-8", errors="backslashreplace", write_through=True)
    atexit.register(relay.drain)
