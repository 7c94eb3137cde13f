"""Loading of weights from safetensors or GGUF files, quantized or not, one tensor at a time, and random weights."""

import contextlib
import math
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import structlog
import torch

from services.common.errors import InvalidRequest
from services.common.model.broken_file import BrokenFile
from services.common.model.checkpoint_files import FLOATS, StoredTensor
from services.common.model.quantized.checkpoint import read_checkpoint
from services.worker.described.checkpoint import EMBEDDING, HEAD, checkpoint_shapes, is_ignored
from services.worker.described.config import ModelConfig
from services.worker.layers.quantized_weight import keeps
from services.worker.models.decoder import DecoderModel
from services.worker.models.experts import Experts
from services.worker.models.quantized_shards import QuantizedShards, keeps_stored, weight_files

# Standard deviation that models are commonly initialised with before training.
_DEVIATION = 0.02
_COMPARED_ROWS = 1024  # of a vocabulary at once
_LOGGED_MODULES = 8
# Ratio of the largest factor of a router's rows to the smallest.
_ROUTER_SKEW = 4.0
_GOLDEN_RATIO = (1 + math.sqrt(5)) / 2

log = structlog.get_logger(__name__)


class LoadTarget(Protocol):
    """Destination of a checkpoint tensor: a tensor, or an object that stores it in another form.

    A target that needs only a part of the tensor also has ``read``. Its argument is the result of ``get_slice`` of
    ``safetensors``. A target that ``keeps`` quantized weights also has ``check_quantized`` and ``copy_quantized``.
    ``copy_rows`` is the inverse of ``copy_``.
    """

    shape: torch.Size
    device: torch.device

    def copy_(self, tensor: torch.Tensor) -> Any:
        """Store ``tensor``, converted to the dtype and device of the target."""


def check(directory: Path, model: ModelConfig) -> None:
    """Compare the headers of the weight files in ``directory`` with ``model``, before memory is allocated.

    Raises ``InvalidRequest`` if a file is broken, or a tensor is missing or has an unexpected shape or dtype, if the
    weights are quantized in a way that is not supported, or if the head has other weights than the embedding to which
    ``config.json`` ties it.
    """
    expected = checkpoint_shapes(model)
    missing = set(expected)
    places: dict[str, Path] = {}  # the files of the embedding and the head
    for shard in read_checkpoint(directory):
        if isinstance(shard, BrokenFile):
            raise shard
        places |= {name: shard.path for name in (EMBEDDING, HEAD) if name in shard.tensors}
        for name, stored in shard.tensors.items():
            if name not in expected:
                continue
            missing.discard(name)
            check_stored(shard.path, name, stored, expected[name])
    check_missing(directory, missing)
    if model.tied_embeddings and HEAD in places and not _are_equal(directory):
        raise InvalidRequest(
            f"{places[HEAD]}: {HEAD} differs from {EMBEDDING}, and config.json ties them; set tie_word_embeddings to"
            f" false in config.json to use both, or remove {HEAD}",
            field="model",
        )


def load(directory: Path, targets: Mapping[str, LoadTarget], model: ModelConfig) -> None:
    """Fill ``targets``, by checkpoint name, from the checkpoint of ``model`` in ``directory``.

    Tensors that only other ranks need are skipped. Raises ``InvalidRequest`` if a file cannot be read, or a tensor is
    missing, unexpected or of another shape than its target.
    """
    known = checkpoint_shapes(model).keys()
    missing = set(targets)
    unexpected: list[str] = []
    converted: list[str] = []
    for path, opened in weight_files(directory):
        try:
            with opened() as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    if name in targets:
                        _fill(targets[name], shard, name, path)
                        missing.discard(name)
                        if _is_quantized_here(targets[name], shard, name):
                            converted.append(name.removesuffix(".weight"))
                    elif name not in known and not is_ignored(name, model) and not _is_zero_bias(shard, name):
                        unexpected.append(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidRequest(f"{path} cannot be read: {error}; fetch the file again", field="model") from error
    check_missing(directory, missing)
    if unexpected:
        raise InvalidRequest(
            f"{directory}: {len(unexpected)} tensors have no place in this architecture, e.g. {min(unexpected)};"
            " config.json and the weights do not belong together",
            field="model",
        )
    if converted:
        log.warning(
            "weights quantized at load, as quantization_config says; the checkpoint has them without quantization",
            count=len(converted),
            modules=", ".join(converted[:_LOGGED_MODULES]) + (", ..." if len(converted) > _LOGGED_MODULES else ""),
        )


def load_dummy(model: DecoderModel, seed: int) -> None:
    """Fill ``model`` with random weights: matrices from normal(0, 0.02), norms one, biases zero.

    They depend on ``seed``, any integer, and on the kind of device, but not on the number of ranks. Routers are
    skewed: some experts receive several times the mean number of tokens.
    """
    for name, target in model.targets().items():
        # Drawn with the shape of the checkpoint tensor, which the target may store in another form.
        tensor = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
        if len(target.shape) > 1:
            # A seed per tensor, so that weights do not depend on which other tensors this rank has.
            tensor_seed = zlib.crc32(f"{seed} {name}".encode())
            tensor.normal_(0, _DEVIATION, generator=torch.Generator(target.device).manual_seed(tensor_seed))
        elif not name.endswith(".bias"):
            tensor.fill_(1)
        target.copy_(tensor)
    for layer in model.layers:
        if isinstance(layer.mlp, Experts):
            _skew(layer.mlp.router)


def _are_equal(directory: Path) -> bool:
    """Return whether the embedding and the head in ``directory`` have equal shapes and values."""
    with contextlib.ExitStack() as files:
        shards = [files.enter_context(opened()) for _, opened in weight_files(directory)]
        first, second = (
            next(shard.get_slice(name) for shard in shards if name in shard.keys())  # noqa: SIM118 (not a mapping)
            for name in (EMBEDDING, HEAD)
        )
        shape = first.get_shape()
        return second.get_shape() == shape and all(
            torch.equal(first[rows : rows + _COMPARED_ROWS].float(), second[rows : rows + _COMPARED_ROWS].float())
            for rows in range(0, shape[0], _COMPARED_ROWS)
        )


def _is_zero_bias(shard: Any, name: str) -> bool:
    return isinstance(shard, QuantizedShards) and shard.is_zero_bias(name)


def _is_quantized_here(target: LoadTarget, shard: Any, name: str) -> bool:
    """Return whether ``target`` quantizes a tensor that ``shard`` should have quantized, and has not."""
    scheme = shard.unused_scheme(name) if isinstance(shard, QuantizedShards) else None
    # A head that is tied to the embedding is quantized because of a flag.
    return scheme is not None and name != EMBEDDING and keeps(target, scheme)


def _skew(router: torch.Tensor) -> None:
    """Scale the rows of ``router [experts, hidden_size]`` in place. Experts with larger rows are chosen more often."""
    # Multiples of the golden ratio spread large and small rows over the experts, and so over the ranks.
    spread = torch.arange(router.shape[0], dtype=torch.float64, device=router.device) * _GOLDEN_RATIO % 1
    router.mul_((_ROUTER_SKEW ** (spread - 0.5)).unsqueeze(1).to(router.dtype))


def check_stored(place: Path | str, name: str, stored: StoredTensor, shape: Sequence[int]) -> None:
    """Raise ``InvalidRequest`` if the tensor ``name`` of ``place`` has not ``shape``, or has no float dtype."""
    _check_shape(place, name, stored.shape, shape)
    if stored.dtype not in FLOATS:
        raise InvalidRequest(
            f"{place}: {name} has dtype {stored.dtype}; expected one of {', '.join(sorted(FLOATS))}: choose a"
            " checkpoint that is not quantized",
            field="model",
        )


def check_missing(place: Path | str, missing: Collection[str]) -> None:
    """Raise ``InvalidRequest`` unless ``missing``, the names of tensors that ``place`` lacks, is empty."""
    if missing:
        raise InvalidRequest(
            f"{place}: {len(missing)} tensors that config.json asks for are missing, e.g. {min(missing)};"
            " the checkpoint is incomplete or of another architecture",
            field="model",
        )


def _check_shape(place: Path | str, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if list(shape) != list(expected):
        raise InvalidRequest(
            f"{place}: {name} has shape {list(shape)}, config.json asks for {list(expected)}", field="model"
        )


@contextlib.contextmanager
def refusing_unfit(place: Path | str, name: str) -> Iterator[None]:
    """Replace ``ValueError`` from the target of ``name``, a quantized tensor of ``place``, by ``InvalidRequest``."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(
            f"{place}: {name} cannot stay quantized: {error}; use quantization=none", field="quantization"
        ) from error


def _fill(target: Any, shard: Any, name: str, path: Path) -> None:
    stored = shard.get_slice(name)
    _check_shape(path, name, stored.get_shape(), target.shape)
    if keeps_stored(target, stored):
        weight = stored.weight()
        with refusing_unfit(path, name):
            target.copy_quantized(weight)
    elif hasattr(target, "read"):
        target.read(stored)
    else:
        target.copy_(shard.get_tensor(name))
