"""Shows the progress of a start on a terminal: one line for each worker, until the deployment is ready."""

import asyncio
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from services.common.process.progress import PROGRESS_FILE, READY, ProgressFile, StartPhase
from services.launcher.deployment import ChildSpec

_REDRAW_S = 0.2
_CLEAR = b"\x1b[J"  # from the cursor to the end of the screen


class StartDisplay:
    """Progress lines below the log. Used on the event loop of ``toka``.

    The cursor stays at the start of the first line, so that a log line replaces them.
    """

    def __init__(
        self,
        files: Mapping[str, ProgressFile],
        stream: BinaryIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a display of ``files``, by name of the worker."""
        self._files = files
        self._stream = stream or sys.stderr.buffer
        self._clock = clock
        self._began = clock()
        self._open = True
        for file in files.values():
            file.path.touch()

    @classmethod
    def of(cls, children: Sequence[ChildSpec], directory: Path) -> "tuple[StartDisplay, list[ChildSpec]]":
        """Return a display of the workers among ``children``, and ``children`` with workers that report to it.

        ``directory`` contains the files with their progress.
        """
        files = {
            child.name: ProgressFile(directory / f"{child.name}.progress")
            for child in children
            if child.role == "worker"
        }
        reporting = [
            replace(child, environment=child.environment | {PROGRESS_FILE: str(files[child.name].path)})
            if child.name in files
            else child
            for child in children
        ]
        return cls(files), reporting

    async def run(self) -> None:
        """Redraw the lines until ``close``."""
        while self._open:
            self.draw()
            await asyncio.sleep(_REDRAW_S)

    def draw(self) -> None:
        """Write the lines and move the cursor back to the start of the first one."""
        columns, rows = shutil.get_terminal_size()
        lines = [f"{name}: {self._phrase(file.read())}"[: columns - 1] for name, file in self._files.items()]
        lines = lines[: max(1, rows - 1)]
        up = f"\x1b[{len(lines) - 1}A" if len(lines) > 1 else ""
        self._write(_CLEAR + "\n".join(lines).encode() + f"\r{up}".encode())

    def write(self, line: bytes) -> None:
        """Write a line of the log above the display."""
        self._write((_CLEAR if self._open else b"") + line)

    def close(self) -> None:
        """Remove the lines. Workers that start later report to the log."""
        if self._open:
            self._open = False
            self._write(_CLEAR)
            for file in self._files.values():
                file.path.unlink(missing_ok=True)

    def _phrase(self, phase: StartPhase | None) -> str:
        if phase is None:
            return f"starting ... {self._clock() - self._began:.0f} s"
        if phase.what == READY:
            return "ready"
        usually = "first start with these flags" if phase.usual_s is None else f"usually {_seconds(phase.usual_s)}"
        return f"{phase.what} ({usually}) ... {self._clock() - phase.since:.0f} s"

    def _write(self, data: bytes) -> None:
        self._stream.write(data)
        self._stream.flush()


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 1 else "less than 1 s"
