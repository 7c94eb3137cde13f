"""Fills a model: from a safetensors checkpoint, one file and one tensor at a time, or with random numbers."""

import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import FLOATS, BrokenFile, read_shards, weight_paths
from services.worker.described.checkpoint import DERIVED, checkpoint_shapes
from services.worker.described.config import ModelConfig
from services.worker.models.decoder import DecoderModel

# What models are initialised with before training, usually.
_DEVIATION = 0.02


class Target(Protocol):
    """What a tensor of a checkpoint is copied into: a tensor, or something that keeps it in another form.

    One that needs but a part of the tensor has ``read``, too: it is given what ``safetensors`` has for ``get_slice``.
    """

    shape: torch.Size
    device: torch.device

    def copy_(self, tensor: torch.Tensor) -> Any: ...


def check(directory: Path, model: ModelConfig) -> None:
    """Compare the heads of the weight files in ``directory`` with ``config.json``, before memory is allocated for what
    either of them says. Raises ``InvalidRequest``."""
    expected = checkpoint_shapes(model)
    missing = set(expected)
    for shard in read_shards(directory):
        if isinstance(shard, BrokenFile):
            raise shard
        for name, stored in shard.tensors.items():
            if name not in expected:
                continue
            missing.discard(name)
            _check_shape(shard.path, name, stored.shape, expected[name])
            if stored.dtype not in FLOATS:
                raise InvalidRequest(
                    f"{shard.path}: {name} has dtype {stored.dtype}; expected one of {', '.join(sorted(FLOATS))}:"
                    " choose a checkpoint that is not quantised",
                    field="model",
                )
    _check_missing(directory, missing)


def load(
    directory: Path, targets: Mapping[str, Target], *, tied_embeddings: bool, elsewhere: Collection[str] = ()
) -> None:
    """Fill every tensor of ``targets`` (checkpoint name -> tensor) from the checkpoint in ``directory``.

    Converts to each target's dtype and device. ``elsewhere``: names of tensors that are other ranks' to load. Raises
    ``InvalidRequest`` naming what is missing, left over, or shaped otherwise than the config says.
    """
    ignored = {*elsewhere, *(["lm_head.weight"] if tied_embeddings else ())}
    missing = set(targets)
    unexpected: list[str] = []
    for path in weight_paths(directory):
        try:
            with safetensors.safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    if name in targets:
                        _fill(targets[name], shard, name, path)
                        missing.discard(name)
                    elif name not in ignored and not name.endswith(DERIVED):
                        unexpected.append(name)
        except (safetensors.SafetensorError, OSError) as error:
            raise InvalidRequest(f"{path} cannot be read: {error}; fetch the file again", field="model") from error
    _check_missing(directory, missing)
    if unexpected:
        raise InvalidRequest(
            f"{directory}: {len(unexpected)} tensors have no place in this architecture, e.g. {min(unexpected)};"
            " config.json and the weights do not belong together",
            field="model",
        )


def load_dummy(model: DecoderModel, seed: int) -> None:
    """Random weights, the same for the same ``seed`` (any integer) and device, however many ranks share the model:
    matrices normal(0, 0.02), norms one, biases zero."""
    for name, target in model.targets().items():
        # Drawn as in a checkpoint, whatever form the target keeps it in.
        tensor = torch.zeros(target.shape, dtype=torch.float32, device=target.device)
        if len(target.shape) == 2:
            # Of its own for each tensor: no other tensor's presence or size matters.
            own_seed = zlib.crc32(f"{seed} {name}".encode())
            tensor.normal_(0, _DEVIATION, generator=torch.Generator(target.device).manual_seed(own_seed))
        elif not name.endswith(".bias"):
            tensor.fill_(1)
        target.copy_(tensor)


def _check_missing(directory: Path, missing: Collection[str]) -> None:
    if missing:
        raise InvalidRequest(
            f"{directory}: {len(missing)} tensors that config.json asks for are missing, e.g. {min(missing)};"
            " the checkpoint is incomplete or of another architecture",
            field="model",
        )


def _check_shape(path: Path, name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if list(shape) != list(expected):
        raise InvalidRequest(
            f"{path}: {name} has shape {list(shape)}, config.json asks for {list(expected)}", field="model"
        )


def _fill(target: Target, shard: safetensors.safe_open, name: str, path: Path) -> None:
    _check_shape(path, name, shard.get_slice(name).get_shape(), target.shape)
    if hasattr(target, "read"):
        target.read(shard.get_slice(name))
    else:
        target.copy_(shard.get_tensor(name))
