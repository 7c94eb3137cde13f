"""Progress of a worker's start: which phase runs, how long it usually takes, and how long it took. No torch here."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import structlog

from services.common.config import WorkerConfig
from services.common.process.progress import READY, ProgressFile

log = structlog.get_logger(__name__)

Phase = Literal["imports", "replica", "weights", "compile", "memory", "rehearsal", "graphs"]

_DOING: dict[Phase, str] = {
    "imports": "loading libraries",
    "replica": "meeting the other workers of the replica",
    "weights": "loading weights",
    "compile": "compiling the model",
    "memory": "measuring memory",
    "rehearsal": "running every kind of step",
    "graphs": "capturing CUDA graphs",
}
# Flags that change how long a start takes. The durations of a start are kept for these values.
_FLAGS = (
    *("model", "device", "dtype", "load_format", "quantization", "tp_size", "pp_size", "torch_compile"),
    *("use_cudagraphs", "cudagraph_max_size", "piecewise_cudagraph_max_tokens", "max_tokens_per_forward"),
    *("max_seqs_per_forward", "kv_cache_dtype", "page_size"),
)
# Packages with kernels or compilers. Another version of them compiles again.
_PACKAGES = ("tokasaurus", "torch")
_FILE = "starts.json"
_MOST_STARTS = 200  # kept in the file; the oldest are dropped


class BootProgress:
    """A reporter of the phases of a start. Used by one thread at a time.

    Each phase is a log line with ``usually_s``, the seconds that it took at the last start with the same flags. If
    there is a ``ProgressFile``, which the display of ``toka`` reads, the phase is written there instead.
    """

    def __init__(
        self,
        times: "StartTimes | None" = None,
        file: ProgressFile | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._times = times
        self._usual_s = {} if times is None else times.read()
        self._file = file
        self._nested_s = [0.0]  # seconds of the phases inside each open phase, behind those of the whole start
        self.seconds: dict[str, float] = {}  # by phase, without the phases inside it

    @classmethod
    def of(cls, config: WorkerConfig) -> "BootProgress":
        """Return the reporter of this process's start, with the durations of earlier starts."""
        return cls(StartTimes(config), ProgressFile.of(os.environ))

    @property
    def first_start(self) -> bool:
        """True if no earlier start with the same flags is known, so that caches of compiled code may be empty."""
        return not self._usual_s

    @contextlib.contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Report ``name`` as running, and measure it. A phase may run inside another one, and more than once."""
        self._report(name)
        started = self._clock()
        self._nested_s.append(0.0)
        try:
            yield
        finally:
            took_s = self._clock() - started
            own_s = took_s - self._nested_s.pop()
            self._nested_s[-1] += took_s
            self.seconds[name] = self.seconds.get(name, 0.0) + own_s

    def _report(self, name: Phase) -> None:
        usual_s = self._usual_s.get(name)
        if self._file is not None and self._file.write(_DOING[name], usual_s):
            return
        usually = {"first_start": True} if usual_s is None else {"usually_s": round(usual_s, 1)}
        log.info(_DOING[name], phase=name, **usually)

    def finish(self) -> None:
        """Report the end of the start, and keep the seconds of each phase for the next one."""
        log.info("started", phases={name: round(seconds, 2) for name, seconds in self.seconds.items()})
        if self._file is not None:
            self._file.write(READY, None)
        if self._times is not None:
            self._times.write(self.seconds)


class StartTimes:
    """The durations of the last start with each set of flags, in ``starts.json`` of ``compile_cache_dir``.

    A file that cannot be read counts as empty. A failed write is ignored.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._path = Path(os.path.expanduser(config.compile_cache_dir)) / _FILE
        flags = config.model_dump(mode="json", include=set(_FLAGS)) | {name: _version(name) for name in _PACKAGES}
        self._key = hashlib.sha256(json.dumps(flags, sort_keys=True).encode()).hexdigest()[:16]
        # The ranks of a replica start together and would overwrite each other's figures.
        self._writes = config.dp_rank == config.tp_rank == config.pp_rank == 0

    def read(self) -> dict[str, float]:
        """Return the seconds of the last start by phase. Empty if there was none with these flags."""
        seconds = self._read_all().get(self._key)
        if not isinstance(seconds, dict):
            return {}
        return {name: float(value) for name, value in seconds.items() if isinstance(value, int | float)}

    def write(self, seconds: Mapping[str, float]) -> None:
        """Keep ``seconds`` by phase for the next start."""
        if not self._writes:
            return
        kept = self._read_all()
        kept.pop(self._key, None)
        kept[self._key] = {name: round(value, 2) for name, value in seconds.items()}
        newest = dict(list(kept.items())[-_MOST_STARTS:])
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=_FILE)
            with os.fdopen(handle, "w") as file:
                json.dump(newest, file)
            os.replace(temporary, self._path)

    def _read_all(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def _version(package: str) -> str:
    """Return the installed version of ``package``; empty where it is not installed as a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
