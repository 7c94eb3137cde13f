"""Files of uploaded weights."""

import contextlib
import errno
import json
import re
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import structlog

from services.common.errors import FailedPrecondition, InvalidRequest
from services.common.model.checkpoint_files import INDEX, StoredTensor
from services.common.model.uploads import uploads_folder, uploads_of
from services.worker.engine.tensor_file import TensorFile
from tokasaurus.common.v1 import weights_pb2

log = structlog.get_logger(__name__)

_FILE = "model.safetensors"
_UPDATE_ID = re.compile(r"[0-9A-Za-z-]{1,64}")


class Uploads:
    """Uploads in the directories ``toka-uploads/OWNER/UPDATE_ID``, as safetensors files. Any thread may call.

    The owner is the worker that wrote the file. Only the owner removes it. Other workers with the same file system
    read it.
    """

    def __init__(self, directory: Path, address: str) -> None:
        """``directory`` is the first of ``weight_directories``.

        ``address`` is where the worker listens. It must be the same after a restart.
        """
        self._all, self._own = uploads_folder(directory), uploads_of(directory, address)
        self._lock = threading.Lock()  # protects the creation and the removal of directories

    def prepare(self, update_id: str) -> bool:
        """Make the directory of an upload, and return True. Return False if another worker has made it.

        Raises ``InvalidRequest`` for a malformed id, and ``FailedPrecondition`` if the directory cannot be made.
        """
        _check_id(update_id)
        with self._lock:
            if any(self._all.glob(f"*/{update_id}")):
                return False
            try:
                (self._own / update_id).mkdir(parents=True)
            except OSError as error:
                raise FailedPrecondition(_cannot_write(self._own, error)) from error
        return True

    def receive(
        self, update_id: str, tensors: Mapping[str, StoredTensor], chunks: Iterable[weights_pb2.TensorChunk]
    ) -> None:
        """Write a prepared upload. ``tensors`` are the descriptions of its tensors by name.

        Raises ``InvalidRequest``, which names the tensor, and ``FailedPrecondition`` if the files cannot be written.
        The caller must then remove the upload.
        """
        with self.writing(update_id, _FILE, tensors) as file:
            for chunk in chunks:
                file.write(chunk.name, chunk.offset, chunk.data)

    @contextlib.contextmanager
    def writing(self, update_id: str, name: str, tensors: Mapping[str, StoredTensor]) -> Iterator[TensorFile]:
        """Yield the file ``name`` of a prepared upload, into which the block writes all of ``tensors``.

        Raises ``InvalidRequest``, which names the tensor, and ``FailedPrecondition`` if the file cannot be written.
        """
        _check_id(update_id)
        path = self._own / update_id / name
        try:
            size, free = sum(each.nbytes for each in tensors.values()), shutil.disk_usage(path.parent).free
            if size > free:
                raise OSError(errno.ENOSPC, f"{size:,} bytes are needed and {free:,} are free")
            with TensorFile(path, tensors) as file:
                yield file
                file.check()
            path.stat()  # a new stream of plans may have removed it
        except OSError as error:
            raise FailedPrecondition(_cannot_write(path, error)) from error

    def owns(self, update_id: str) -> bool:
        """Return whether this worker has prepared the upload, and so has to write it."""
        return bool(_UPDATE_ID.fullmatch(update_id)) and (self._own / update_id).is_dir()

    def write_index(self, update_id: str, files: Mapping[str, str]) -> None:
        """Write the index of an upload that has several files. ``files`` has the file name of each tensor.

        Raises ``FailedPrecondition`` if it cannot be written.
        """
        path = self._own / update_id / INDEX
        try:
            path.write_text(json.dumps({"metadata": {}, "weight_map": dict(files)}))
        except OSError as error:
            raise FailedPrecondition(_cannot_write(path, error)) from error

    def find(self, update_id: str) -> Path:
        """Return the directory of an upload to this worker, or to another worker with the same file system.

        Raises ``InvalidRequest`` if there is none.
        """
        if _UPDATE_ID.fullmatch(update_id):
            found = [self._own / update_id, *sorted(self._all.glob(f"*/{update_id}"))]
            for directory in found:
                if directory.is_dir():
                    return directory
        raise InvalidRequest(
            f"{self._all} has no upload of the update {update_id[:64]!r}: it was discarded or removed; upload the"
            " weights again",
            field="directory",
        )

    def remove(self, update_id: str) -> None:
        """Remove an upload to this worker. An unknown id has no effect."""
        if _UPDATE_ID.fullmatch(update_id):
            with self._lock:
                self._remove(self._own / update_id)

    def keep_only(self, update_id: str) -> None:
        """Remove all uploads to this worker except that of ``update_id``. An empty id keeps none."""
        with self._lock:
            for directory in list(self._own.glob("*")):
                if directory.name != update_id:
                    self._remove(directory)

    def _remove(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        if directory.exists():
            log.warning("an upload cannot be removed: remove it yourself", path=str(directory))
        with contextlib.suppress(OSError):  # it still has another upload
            self._own.rmdir()


def _check_id(update_id: str) -> None:
    if not _UPDATE_ID.fullmatch(update_id):
        raise InvalidRequest("expected 1 to 64 ASCII letters, digits and '-'", field="update_id")


def _cannot_write(path: Path, error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return f"{path}: the disk has too little space for the upload ({error.strerror}); make room, and upload again"
    return f"{path} cannot be written ({error.strerror}); give the worker the right to write there, and upload again"
