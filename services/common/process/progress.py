"""File in which a child of ``toka`` reports the phase of its start. The display of ``toka`` reads it."""

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
class StartPhase:
    """Phase of a child's start."""

    what: str  # such as "loading weights"; ``READY`` at the end
    since: float  # time.time()
    usual_s: float | None  # duration of the phase at the last start, or None if unknown


@dataclass(frozen=True)
class ProgressFile:
    """File that holds the current phase. The reading process creates and removes it; the child writes it."""

    path: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> "ProgressFile | None":
        """Return the file that the parent process reads, or None if it reads none."""
        path = environment.get(PROGRESS_FILE)
        return None if path is None else cls(Path(path))

    def write(self, what: str, usual_s: float | None) -> bool:
        """Replace the phase. Return False if the file cannot be written, or is gone because no process reads it."""
        temporary = self.path.with_suffix(".new")
        with contextlib.suppress(OSError):
            if self.path.exists():
                temporary.write_text(json.dumps({"what": what, "since": time.time(), "usual_s": usual_s}))
                os.replace(temporary, self.path)
                return True
        return False

    def read(self) -> StartPhase | None:
        """Return the phase, or None if nothing has been written yet."""
        try:
            return StartPhase(**json.loads(self.path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
