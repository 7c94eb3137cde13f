"""Tensors of new weights while they arrive at this worker."""

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from services.common.model.checkpoint_files import StoredTensor
from services.worker.boot.common import Loaded
from services.worker.engine.uploads import Uploads
from services.worker.models.base import Staged
from services.worker.models.received import ReceivedTensors

DTYPES = {  # by the names in safetensors files
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass
class _Update:
    """An update whose tensors are arriving."""

    update_id: str
    source: object  # the object that the tensors come through
    tensors: ReceivedTensors
    files: dict[str, str] = field(default_factory=dict)  # file name of each tensor
    calls: int = 0


class Arrivals:
    """The tensors of one update that have arrived. Any thread may call, one at a time for ``keep``."""

    def __init__(self, loaded: Loaded, uploads: Uploads) -> None:
        """Start without an update. ``uploads`` writes the tensors of updates that were prepared there."""
        self._loaded, self._uploads = loaded, uploads
        self._lock = threading.Lock()  # protects the next field
        self._update: _Update | None = None

    def keep(
        self,
        update_id: str,
        source: object,
        tensors: Mapping[str, StoredTensor],
        arriving: Iterable[tuple[str, torch.Tensor]],
    ) -> list[str]:
        """Keep ``tensors``, described by name. Return the names of the model's tensors that have not arrived.

        ``arriving`` yields name and values of each of them, on any device, after they have been checked. The tensors of
        another update or ``source`` are forgotten. Raises ``InvalidRequest``, which names the tensor, and
        ``FailedPrecondition``.
        """
        update = self._continue(update_id, source)
        update.tensors.check(tensors)
        update.calls += 1
        with ExitStack() as stack:
            file = None
            if tensors and self._uploads.owns(update_id):
                name = f"model-{update.calls:05}.safetensors"
                file = stack.enter_context(self._uploads.writing(update_id, name, tensors))
                update.files |= dict.fromkeys(tensors, name)
            for name, tensor in arriving:
                host = update.tensors.add(name, tensors[name], tensor)
                if file is not None and host.numel():
                    file.write(name, 0, _content(host))
        return update.tensors.missing

    def take(self, update_id: str) -> Staged | None:
        """Return the weights of an update, and forget them here. Return None if its tensors did not arrive here.

        Raises ``InvalidRequest``, which names a tensor that is missing.
        """
        with self._lock:
            update = self._update
            if update is None or update.update_id != update_id:
                return None
            self._update = None
        staged = update.tensors.staged()
        if self._uploads.owns(update_id):
            self._uploads.write_index(update_id, update.files)
        return staged

    def forget(self, update_id: str | None = None) -> None:
        """Forget the tensors of an update, or of any update."""
        with self._lock:
            if self._update is not None and update_id in (None, self._update.update_id):
                self._update = None

    def forget_source(self, source: object) -> None:
        """Forget the tensors that came through ``source``."""
        with self._lock:
            if self._update is not None and self._update.source is source:
                self._update = None

    def _continue(self, update_id: str, source: object) -> _Update:
        """Return the update, which begins if another one was arriving before."""
        with self._lock:
            if self._update is None or self._update.update_id != update_id or self._update.source is not source:
                self._update = _Update(update_id, source, self._loaded.source.receive(self._loaded.model))
            return self._update


def _content(tensor: torch.Tensor) -> memoryview:
    content: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()  # not typed as a buffer
    return memoryview(content)
