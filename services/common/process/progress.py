"""File in which a child of ``toka`` says what it is doing while it starts, and which the display of ``toka`` reads."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.common.flags import ENV_PREFIX

PROGRESS_FILE = f"{ENV_PREFIX}PROGRESS_FILE"
READY = "ready"


@dataclass(frozen=True)
class Doing:
    """A phase of a start."""

    what: str  # such as "loading weights"; ``READY`` at the end
    since: float  # time.time()
    usual_s: float | None  # seconds that it took the last time; None: not known


@dataclass(frozen=True)
class ProgressFile:
    """A file that holds the phase of the moment. Made and removed by the process that reads it, written by another."""

    path: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "ProgressFile | None":
        """Return the file that the parent process reads; None if it reads none."""
        path = environment.get(PROGRESS_FILE)
        return None if path is None else cls(Path(path))

    def write(self, what: str, usual_s: float | None) -> bool:
        """Replace the phase. Returns False if the file is gone, since no process reads it, or cannot be written."""
        temporary = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):
            if self.path.exists():
                temporary.write_text(json.dumps({"what": what, "since": time.time(), "usual_s": usual_s}))
                os.replace(temporary, self.path)
                return True
        return False

    def read(self) -> Doing | None:
        """Return the phase, or None if nothing has been written yet."""
        try:
            return Doing(**json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
