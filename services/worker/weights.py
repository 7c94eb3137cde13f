"""Fills a model: from a safetensors checkpoint, one file and one tensor at a time, or with random numbers."""

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from services.common.errors import InvalidRequest
from services.common.model_files import read_json
from services.worker.models.checkpoint import DERIVED
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
    for path in _files(directory):
        try:
            with safetensors.safe_open(path, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a mapping)
                    if name in targets:
                        _fill(targets[name], shard, name, path)
                        missing.discard(name)
                    elif name not in ignored and not name.endswith(DERIVED):
                        unexpected.append(name)
        except safetensors.SafetensorError as error:
            raise InvalidRequest(f"{path} cannot be read: {error}; fetch the file again", field="model") from error
    if missing:
        raise InvalidRequest(
            f"{directory}: {len(missing)} tensors that config.json asks for are missing, e.g. {min(missing)};"
            " the checkpoint is incomplete or of another architecture",
            field="model",
        )
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


def _files(directory: Path) -> list[Path]:
    index = read_json(directory / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values())) or ["model.safetensors"]
    for name in names:
        if not (directory / name).is_file():
            raise InvalidRequest(f"{directory / name} does not exist: the weights are incomplete", field="model")
    return [directory / name for name in names]


def _fill(target: Target, shard: safetensors.safe_open, name: str, path: Path) -> None:
    shape = shard.get_slice(name).get_shape()
    if shape != list(target.shape):
        raise InvalidRequest(
            f"{path}: {name} has shape {shape}, config.json asks for {list(target.shape)}", field="model"
        )
    if hasattr(target, "read"):
        target.read(shard.get_slice(name))
    else:
        target.copy_(shard.get_tensor(name))
