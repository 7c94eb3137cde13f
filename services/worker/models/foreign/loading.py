"""The weights of a model of transformers: checked, read from safetensors files, or random."""

import re
import zlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from services.common.boundaries import errors_to
from services.common.errors import InvalidRequest
from services.common.model.broken_file import BrokenFile
from services.common.model.checkpoint_files import FLOATS, read_shards, weight_paths
from services.worker.models.foreign.skeleton import first_line
from services.worker.models.gguf_shard import open_shard

# Standard deviation that models are commonly initialised with before training.
_DEVIATION = 0.02


def check(directory: Path, model: Any) -> None:
    """Compare the headers of the weight files in ``directory`` with ``model``, before memory is allocated.

    Raises ``InvalidRequest`` if a file is broken, or a tensor is missing or has an unexpected shape or dtype.
    """
    transforms = get_model_conversion_mapping(model) or []
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, WeightConverter)]
    expected = model.state_dict()
    missing = set(expected)
    for shard in read_shards(directory):
        if isinstance(shard, BrokenFile):
            raise shard
        for name, stored in shard.tensors.items():
            renamed, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
            if renamed not in expected:
                continue
            missing -= _made_with(renamed, converted, converters)
            if stored.dtype not in FLOATS and expected[renamed].is_floating_point():
                raise InvalidRequest(
                    f"{shard.path}: {name} has dtype {stored.dtype}; expected one of {', '.join(sorted(FLOATS))}:"
                    " choose a checkpoint that is not quantized",
                    field="model",
                )
            if converted is None and list(stored.shape) != list(expected[renamed].shape):
                raise InvalidRequest(
                    f"{shard.path}: {name} has shape {list(stored.shape)}, config.json asks for"
                    f" {list(expected[renamed].shape)}",
                    field="model",
                )
    _refuse_missing(directory, model, missing)


def load(directory: Path, model: Any, device: torch.device) -> None:
    """Fill ``model`` from the checkpoint in ``directory``, and move it to ``device``.

    Raises ``InvalidRequest`` if a file cannot be read, or a tensor is missing, unexpected or of another shape.
    """
    settings = LoadStateDictConfig(
        dtype=model.dtype, device_map={"": device}, weight_mapping=get_model_conversion_mapping(model) or []
    )
    errors: list[BaseException] = []
    with ExitStack() as files, errors_to(errors.append):
        stored: dict[str, Any] = {}
        for path in weight_paths(directory):
            shard = files.enter_context(open_shard(path))
            stored |= {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a mapping)
        info, _ = convert_and_load_state_dict_in_model(model, stored, settings)
    if errors:
        raise InvalidRequest(
            f"{directory}: the weights cannot be read: {first_line(errors[0])}; fetch the files again", field="model"
        ) from errors[0]
    broken = {**dict.fromkeys(map(str, info.mismatched_keys), "another shape"), **info.conversion_errors}
    if broken:
        name, problem = min(broken.items())
        raise InvalidRequest(
            f"{directory}: {len(broken)} tensors do not fit config.json, e.g. {name} ({problem}); config.json and the"
            " weights do not belong together",
            field="model",
        )
    _refuse_missing(directory, model, info.missing_keys)
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()), r"rotary_emb\.inv_freq$"]
    tied = model.all_tied_weights_keys
    unexpected = [
        name
        for name in info.unexpected_keys
        if name not in tied and not any(re.search(pattern, name) for pattern in ignored)
    ]
    if unexpected:
        raise InvalidRequest(
            f"{directory}: {len(unexpected)} tensors have no place in this architecture, e.g. {min(unexpected)};"
            " config.json and the weights do not belong together",
            field="model",
        )
    _finish(model, device)


def load_dummy(model: Any, device: torch.device, seed: int) -> None:
    """Fill ``model`` with random weights: matrices from normal(0, 0.02), norms one, biases zero. Move it to ``device``.

    They depend on ``seed``, any integer, and on the kind of device.
    """
    for name, parameter in list(model.named_parameters()):
        tensor = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        if tensor.dim() > 1:
            tensor_seed = zlib.crc32(f"{seed} {name}".encode())
            tensor.normal_(0, _DEVIATION, generator=torch.Generator(device).manual_seed(tensor_seed))
        elif not name.endswith("bias"):
            tensor.fill_(1)
        path, _, last = name.rpartition(".")
        model.get_submodule(path).register_parameter(last, nn.Parameter(tensor, requires_grad=False))
    _finish(model, device)


def _made_with(name: str, source: str | None, converters: Collection[Any]) -> set[str]:
    """Return the parameters that are made from a stored tensor, whose first is ``name``."""
    for converter in converters:
        if source is not None and source in converter.source_patterns:
            first, *_ = converter.target_patterns
            return {name.replace(first, target) for target in converter.target_patterns} | {name}
    return {name}


def _refuse_missing(directory: Path, model: Any, names: Collection[str]) -> None:
    tied: Mapping[str, str] = model.all_tied_weights_keys
    missing = set(names) - tied.keys() - {name for name, _ in model.named_buffers()}
    if missing:
        raise InvalidRequest(
            f"{directory}: {len(missing)} tensors that config.json asks for are missing, e.g. {min(missing)};"
            " the checkpoint is incomplete or of another architecture",
            field="model",
        )


def _finish(model: Any, device: torch.device) -> None:
    """Share tied parameters, and move the buffers to ``device``."""
    model.tie_weights()
    model.to(device)
