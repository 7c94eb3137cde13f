"""The weights of a worker's model: their version, their checksums, and updates while it runs."""

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch

from services.common.errors import FailedPrecondition, Internal, InvalidRequest, PermissionDenied, Unavailable
from services.common.memory_parts import MemoryPart
from services.common.model.checkpoint_files import StoredTensor
from services.common.request_bounds import MAX_WEIGHTS_VERSION
from services.worker.boot.common import Loaded
from services.worker.engine.arrivals import Arrivals
from services.worker.engine.broadcast import Broadcasts
from services.worker.engine.shared_weights import SharedWeights
from services.worker.engine.uploads import Uploads
from services.worker.models.base import Staged, TensorRows
from services.worker.models.staging import refuse_quantized
from services.worker.runner.base import Runner
from tokasaurus.common.v1 import weights_pb2

log = structlog.get_logger(__name__)

_MOST_CHARACTERS = 4096  # of a directory
_CHECKSUM_BYTES = 16


class WeightsVersion(NamedTuple):
    """Which weights a worker has. The values of the start are empty and 0, but for the directory."""

    version: str
    directory: str
    committed_unix_ns: int = 0
    update_id: str = ""
    fingerprint: int = 0
    uploaded: bool = False


class _Update(NamedTuple):
    """An update that is staged."""

    update_id: str
    version: str
    directory: str
    uploaded: bool
    staged: Staged


class _Receivers(NamedTuple):
    """The parts of a worker that receive new weights from trainers."""

    uploads: Uploads
    arrivals: Arrivals
    broadcasts: Broadcasts
    shared: SharedWeights


class ModelWeights:
    """The weights of one rank. RPC threads call the methods, one at a time for changes."""

    def __init__(
        self,
        loaded: Loaded,
        runner: Runner,
        run_alone: Callable[[Callable[[], None], Callable[[], bool]], "Future[None]"],
        directories: Sequence[str],
        address: str,
    ) -> None:
        """``run_alone`` is that of ``Engine``. ``directories`` is the flag ``weight_directories``.

        ``address`` is where the worker listens.
        """
        self._loaded, self._runner, self._run_alone = loaded, runner, run_alone
        self._directories = [Path(each).expanduser().resolve() for each in directories]
        self._receivers = self._make_receivers(address) if self._directories else None
        self.changing = threading.Lock()  # held while tensors are read or written, given back or taken again
        self._writing = threading.Lock()  # held from the first written tensor until ``version`` is that of the tensors
        self._staged: _Update | None = None
        self.version = WeightsVersion("", str(loaded.directory))

    def stage(self, update_id: str, version: str, directory: str) -> Staged:
        """Read and check new weights, and return them.

        With an empty ``directory``, they are those that were received or uploaded for the update.

        Raises ``InvalidRequest``, ``PermissionDenied`` and ``FailedPrecondition``. Then nothing is staged.
        """
        if not update_id or not version or len(version) > MAX_WEIGHTS_VERSION:
            raise InvalidRequest(f"expected 1 to {MAX_WEIGHTS_VERSION} characters", field="version")
        with self.changing:
            self._staged = None
            path = directory or str(self.uploads.find(update_id))
            staged = None if directory else self._ready().arrivals.take(update_id)
            if staged is None:
                staged = self._read(path, uploaded=not directory)
            self._staged = _Update(update_id, version, path, not directory, staged)
        return staged

    def commit(
        self, update_id: str, committed_unix_ns: int = 0, is_wanted: Callable[[], bool] = lambda: True
    ) -> WeightsVersion:
        """Write the staged weights over the present ones, between two steps.

        ``committed_unix_ns`` is the time to report, or 0 for the present time. ``is_wanted`` is as in
        ``Engine.run_alone``.

        Raises ``FailedPrecondition`` if the update is not staged or the weights are asleep, ``Unavailable`` if the
        worker ends before it is written or it is not wanted any more, and ``Internal`` if the worker must end.
        """
        with self.changing:
            update, self._staged = self._staged, None
            if update is None or update.update_id != update_id:
                self._staged = update
                raise FailedPrecondition(f"the update {update_id!r} is not staged; stage it again")
            self._check_awake()

            def write() -> None:
                self._loaded.source.apply(update.staged, self._loaded.model)
                self._runner.weights_changed()
                if self._loaded.memory is not None:
                    self._loaded.memory.mark_replaced()

            with self._writing:
                try:
                    self._run_alone(write, is_wanted).result()
                except Unavailable:  # nothing was written
                    raise
                except Exception as error:
                    raise Internal(f"the weights were written in part ({error!r}); the worker ends") from error
                fingerprint = update.staged.fingerprint
                time_ns = committed_unix_ns or time.time_ns()
                self.version = WeightsVersion(
                    update.version, update.directory, time_ns, update_id, fingerprint, update.uploaded
                )
        log.info("weights replaced", version=update.version, directory=update.directory)
        return self.version

    def discard(self, update_id: str, *, remove_upload: bool = False) -> None:
        """Forget a staged update. With ``remove_upload``, also remove its upload, unless it is committed."""
        with self.changing:
            if self._staged is not None and self._staged.update_id == update_id:
                self._staged = None
            if self._receivers is not None:
                self._receivers.arrivals.forget(update_id)
                if remove_upload and update_id != self.version.update_id:
                    self._receivers.uploads.remove(update_id)

    @property
    def uploads(self) -> Uploads:
        """The uploads of updates. Raises ``PermissionDenied`` without ``weight_directories``."""
        return self._ready().uploads

    @property
    def broadcasts(self) -> Broadcasts:
        """The groups with trainers. Raises ``PermissionDenied`` without ``weight_directories``."""
        return self._ready().broadcasts

    @property
    def shared(self) -> SharedWeights:
        """The tensors that trainers share. Raises ``PermissionDenied`` without ``weight_directories``."""
        return self._ready().shared

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self._loaded.model.device

    @property
    def rank_index(self) -> int:
        """The number of the worker in its replica."""
        return self._loaded.model.ranks.index

    def receive(
        self, update_id: str, tensors: Mapping[str, StoredTensor], chunks: Iterable[weights_pb2.TensorChunk]
    ) -> None:
        """Write a prepared upload if its ``tensors`` fit the model. Raises the errors of ``Uploads.receive``."""
        self._loaded.source.check_upload(tensors)
        self.uploads.receive(update_id, tensors, chunks)

    def settled_version(self) -> WeightsVersion:
        """Return the version, after the end of a commit that a scheduler which was lost may have begun."""
        with self._writing:
            return self.version

    def remove_abandoned_uploads(self) -> None:
        """Remove all uploads except that of the present weights. Called when a scheduler begins a stream of plans."""
        if self._receivers is not None:
            self._receivers.arrivals.forget()
            self._receivers.uploads.keep_only(self.settled_version().update_id)

    def read_rows(self, name: str, rows: int) -> TensorRows:
        """Return the first ``rows`` rows of the checkpoint's tensor ``name``, between two updates.

        Raises ``NotFound``, ``InvalidRequest`` if the rows have too many values, and ``FailedPrecondition`` if the
        weights are asleep, were dropped, or are those of a model that runs through transformers.
        """
        if not rows:
            raise InvalidRequest("expected at least 1", field="rows")
        with self.changing:
            self._check_present()
            return self._loaded.source.read_rows(self._loaded.model, name, rows)

    def checksums(self) -> tuple[WeightsVersion, list[tuple[str, str]]]:
        """Return the version, and name and checksum of each tensor in the order of names, between two updates.

        Raises ``FailedPrecondition`` if the weights are asleep, or were dropped.
        """
        with self.changing:
            self._check_present()
            state = self._loaded.model.state_dict()
            return self.version, [(name, _checksum(state[name])) for name in sorted(state)]

    def _make_receivers(self, address: str) -> _Receivers:
        uploads = Uploads(self._directories[0], address)
        arrivals = Arrivals(self._loaded, uploads)
        return _Receivers(uploads, arrivals, Broadcasts(self.device, arrivals), SharedWeights(self.device, arrivals))

    def _ready(self) -> _Receivers:
        """Return the parts that receive new weights. Raises ``PermissionDenied`` without ``weight_directories``."""
        if self._receivers is None:
            raise _without_directories()
        return self._receivers

    def _check_present(self) -> None:
        self._check_awake()
        if self._loaded.memory is not None and self._loaded.memory.dropped:
            raise FailedPrecondition("the weights were dropped by a sleep; wake all parts, or replace the weights")

    def _check_awake(self) -> None:
        if self._loaded.memory is not None and MemoryPart.WEIGHTS in self._loaded.memory.asleep:
            raise FailedPrecondition("the weights are asleep; wake them first")

    def _read(self, path: str, *, uploaded: bool) -> Staged:
        try:
            permitted = self._permitted(path)
            refuse_quantized(permitted)
            return self._loaded.source.stage(permitted, self._loaded.model)
        except InvalidRequest as error:
            error.field = "header.tensors" if uploaded else error.field
            raise

    def _permitted(self, directory: str) -> Path:
        """Return the resolved ``directory``. Raises ``PermissionDenied`` and ``InvalidRequest``."""
        if not self._directories:
            raise _without_directories()
        path = Path(directory)
        if len(directory) > _MOST_CHARACTERS or "\0" in directory or not path.is_absolute():
            raise InvalidRequest("expected an absolute path", field="directory")
        try:
            path = path.resolve()
            is_directory = path.is_dir()
        except (OSError, RuntimeError, ValueError) as error:  # a name is too long, links form a loop, or its encoding
            raise InvalidRequest(
                f"{directory[:256]} is no path on the worker's host: {error}", field="directory"
            ) from error
        if not any(path.is_relative_to(each) for each in self._directories):
            allowed = ", ".join(map(str, self._directories))
            raise PermissionDenied(f"{directory} is not inside of weight_directories={allowed}")
        if not is_directory:
            raise InvalidRequest(f"{directory} is no directory on the worker's host", field="directory")
        return path


def _without_directories() -> PermissionDenied:
    return PermissionDenied(
        "this worker replaces no weights: start it with weight_directories=, the directories to read them from"
    )


def _checksum(tensor: torch.Tensor) -> str:
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()  # not typed as a buffer
    return hashlib.blake2b(content, digest_size=_CHECKSUM_BYTES).hexdigest()
