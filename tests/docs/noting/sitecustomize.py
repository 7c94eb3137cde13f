"""Loaded by every Python process that has this folder in PYTHONPATH: notes which thread runs which file of services/.

A process writes what it has seen into ``NOTE_THREADS``, each time that there is something new: lines of a file, a
function, and the name of a thread. What modules do when they are imported is not looked at, nor how objects are made:
that is where their owners are made.
"""

import inspect
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

_LOOK_S = 0.5
_FUNCTION = inspect.CO_NEWLOCALS  # bodies of modules and classes have no such flag
_MAKING = {"__init__", "__new__", "__post_init__"}
_seen: dict[tuple[str, str], str] = {}  # (file, thread) -> the first function


def _note(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event != "call" or "/services/" not in code.co_filename or not code.co_flags & _FUNCTION:
        return
    if code.co_name not in _MAKING:
        _seen.setdefault((code.co_filename, threading.current_thread().name), code.co_qualname)


def _write(folder: Path) -> None:
    kind = next((each for each in sys.orig_argv if each.startswith("services.")), "")
    file = folder / f"{kind}-{os.getpid()}"
    written = -1
    while True:
        if len(_seen) > written:
            written = len(_seen)
            seen = sorted((path, thread, function) for (path, thread), function in _seen.copy().items())
            file.write_text("".join("\t".join(each) + "\n" for each in seen))
        time.sleep(_LOOK_S)


if (_folder := os.environ.get("NOTE_THREADS")) and any(each.startswith("services.") for each in sys.orig_argv):
    threading.Thread(target=_write, args=(Path(_folder),), name="noting", daemon=True).start()
    threading.setprofile(_note)
    sys.setprofile(_note)
