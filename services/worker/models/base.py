"""The interface of models, which runners compute, and of their sources, from which the boot makes them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import nn

from services.common.config import ChosenWorkerConfig
from services.common.errors import FailedPrecondition
from services.common.model.checkpoint_files import StoredTensor
from services.worker.attention.base import AttentionStep, LayerAttention, RotatingAttentionStep
from services.worker.described.config import ModelConfig, Windows
from services.worker.described.ranks import Ranks
from services.worker.layers.quantized_weight import QuantizedWeight
from services.worker.layers.rotary import RotationTables
from services.worker.parallel.exchange import ALONE, Exchange

if TYPE_CHECKING:
    from services.worker.models.received import ReceivedTensors

# Returns a function as one compiled graph. The arguments are the function and the dimension of its tensors that is the
# number of tokens.
Compile: TypeAlias = Callable[[Callable[..., Any], int], Callable[..., Any]]


class Staged(NamedTuple):
    """New weights in host memory."""

    tensors: Mapping[str, torch.Tensor | QuantizedWeight]  # by checkpoint name, those that the rank needs
    fingerprint: int  # of all tensors of the checkpoint, 0 to 2^64 - 1; equal on all ranks

    @property
    def nbytes(self) -> int:
        """The size of the tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class TensorRows(NamedTuple):
    """The first rows of a checkpoint's tensor, as far as a rank holds them."""

    shape: tuple[int, ...]
    values: torch.Tensor | None  # float32 on the host, NaN where another rank holds the value. None: all are elsewhere


class RankModel(nn.Module, ABC):
    """The share of a model that a rank holds. Its weights are read-only after the boot."""

    config: ModelConfig  # of the whole model
    local: ModelConfig  # of this rank's share
    ranks: Ranks
    dtype: torch.dtype
    device: torch.device
    first: bool  # the rank has the first stage of a pipeline
    last: bool  # the rank has the last stage of a pipeline
    layer_range: range
    windows: Windows
    quantizes: bool
    rotaries: Sequence[RotationTables]  # at least one
    compiled: bool = False  # the layers are graphs, and calls of another kind would compile more of them
    may_wait: bool = False  # the code may make the host wait for the device, so that CUDA graphs cannot capture it

    @abstractmethod
    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        """Return the normalised hidden states ``[tokens, hidden_size]`` for token ids and positions ``[tokens]`` int64.

        ``keep [samples]`` int32 or int64 selects tokens, in any order. The result is then ``[samples, hidden_size]``.
        Keys and values are stored for all tokens.

        On later stages, ``inputs`` is the result of the stage before and is changed in place. Stages before the last
        ignore ``keep`` and return this rank's rows of the residual stream, ``[rows, hidden_size]``.
        """

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of keys and values in the cache, if no flag chooses another."""
        return self.dtype

    @abstractmethod
    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[rows, vocab_size]`` of ``hidden [rows, hidden_size]`` in the model's dtype.

        They are the same on all ranks, and may be a view of a wider tensor.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[rows, vocab_size]`` float32 of ``hidden [rows, hidden_size]``."""
        return self.project(hidden).float()

    @abstractmethod
    def compile_layers(self, compiled: Compile) -> None:
        """Replace the layers by the result of ``compiled``. Call it before the first step."""

    @abstractmethod
    def attention_layers(self) -> list[LayerAttention]:
        """Return the rules by which the attention backend computes each layer of this stage.

        Call it after the weights are loaded.
        """


class ModelSource(ABC):
    """The files of a model and the code that computes it, from which the boot makes a ``RankModel``."""

    described: ModelConfig
    replaces_weights = False  # has ``stage``, ``check_upload`` and ``apply``

    @abstractmethod
    def check(self) -> None:
        """Compare the headers of the weight files with the model, before memory is allocated.

        Raises ``InvalidRequest`` if a file is broken, or a tensor is missing or has an unexpected shape or dtype.
        """

    @abstractmethod
    def make(
        self,
        config: ChosenWorkerConfig,
        described: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        layers: range,
    ) -> RankModel:
        """Return a rank's ``layers`` of the model. ``described`` is the description as ``laid_out`` for ``device``."""

    @abstractmethod
    def fill(self, model: RankModel, *, dummy: bool) -> None:
        """Fill the weights of ``model``, which ``make`` returned, from the files, or with random values.

        Raises ``InvalidRequest`` if a file cannot be read, or does not fit the model.
        """

    def stage(self, directory: Path, model: RankModel) -> Staged:
        """Return the tensors in ``directory`` for ``model``, which ``fill`` has filled and which may be running.

        Raises ``InvalidRequest``, which names the tensor that does not fit, and ``FailedPrecondition``.
        """
        raise _irreplaceable()

    def check_upload(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Check the descriptions, by name, of tensors that will be uploaded.

        Raises ``InvalidRequest``, which names the tensor that does not fit, and ``FailedPrecondition``.
        """
        raise _irreplaceable()

    def receive(self, model: RankModel) -> "ReceivedTensors":
        """Return an empty collection for tensors of ``model`` from a trainer. Raises ``FailedPrecondition``."""
        raise _irreplaceable()

    def apply(self, staged: Staged, model: RankModel) -> None:
        """Write ``staged`` over the weights of ``model``, in place. No step may run."""
        raise _irreplaceable()

    def read_rows(self, model: RankModel, name: str, rows: int) -> TensorRows:
        """Return the first ``rows`` rows of the checkpoint's tensor ``name``, from the weights of ``model``.

        Raises ``NotFound``, ``InvalidRequest`` if the rows have too many values, and ``FailedPrecondition``.
        """
        raise FailedPrecondition("the weights of a model that runs through transformers cannot be read by name")


def _irreplaceable() -> FailedPrecondition:
    return FailedPrecondition(
        "the weights of a model that runs through transformers cannot be replaced; restart the worker with the new ones"
    )
