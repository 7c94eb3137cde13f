"""The choice of a model's implementation, native or through transformers, and the source of its weights."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import structlog
import torch

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.model import files as model_files
from services.common.model.checkpoint_files import StoredTensor
from services.worker.described.config import ModelConfig
from services.worker.described.foreign import read_described, refuse_missing_library
from services.worker.described.forms import layer_forms
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config
from services.worker.layers.factory import make_kept_linears, make_kernels, make_linear
from services.worker.layers.linear import LinearMaker
from services.worker.layers.panels import TOGETHER, PanelLinear
from services.worker.models import reading, staging, weights
from services.worker.models.base import ModelSource, RankModel, Staged, TensorRows
from services.worker.models.decoder import DecoderModel
from services.worker.models.received import ReceivedTensors

log = structlog.get_logger(__name__)


class _Choice(NamedTuple):
    """The files of a model, and the implementation that computes it."""

    card: model_files.ModelCard
    raw: Mapping[str, Any]  # content of ``config.json``
    described: ModelConfig  # ``described.foreign`` is None for the native implementation
    reason: str  # for the log


class NativeSource(ModelSource):
    """A directory with a model of an architecture in the registry."""

    replaces_weights = True

    def __init__(self, directory: Path, described: ModelConfig) -> None:
        self._directory, self.described = directory, described

    def check(self) -> None:
        weights.check(self._directory, self.described)

    def make(
        self,
        config: ChosenWorkerConfig,
        described: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        layers: range,
    ) -> DecoderModel:
        return make_model(config, described, dtype, device, ranks, layers)

    def fill(self, model: RankModel, *, dummy: bool) -> None:
        own = _own(model)
        if dummy:
            weights.load_dummy(own, seed=0)
        else:
            weights.load(self._directory, own.targets(), self.described)

    def stage(self, directory: Path, model: RankModel) -> Staged:
        return staging.stage(directory, _own(model), self.described)

    def check_upload(self, tensors: Mapping[str, StoredTensor]) -> None:
        staging.check_upload(tensors, self.described)

    def receive(self, model: RankModel) -> ReceivedTensors:
        return ReceivedTensors(_own(model).targets().keys(), self.described)

    def apply(self, staged: Staged, model: RankModel) -> None:
        staging.apply(staged, _own(model))

    def read_rows(self, model: RankModel, name: str, rows: int) -> TensorRows:
        return reading.read_rows(_own(model), self.described, name, rows)


def _own(model: RankModel) -> DecoderModel:
    if not isinstance(model, DecoderModel):
        raise TypeError(f"{type(model).__name__} is not a model that this source made")
    return model


def open_model(config: WorkerConfig, dtype: torch.dtype) -> tuple[model_files.ModelCard, ModelSource]:
    """Return the files of the model that ``config`` names, and its source. Log the implementation and the reason.

    ``dtype`` is that of the weights. Raises ``InvalidRequest``, which names the file or flag.
    """
    card, raw, described, reason = _choose(config)
    log.info("model implementation", name="transformers" if described.foreign else "native", reason=reason)
    if described.foreign is None:
        return card, NativeSource(card.directory, described)
    refuse_missing_library(described.foreign)
    from services.worker.models.foreign.source import ForeignSource  # loads transformers, which may not be installed

    return card, ForeignSource(card.directory, raw, described, dtype)


def read_model(config: WorkerConfig) -> tuple[model_files.ModelCard, ModelConfig]:
    """Return the files and the description of the model that ``config`` names. The context limit is that of ``config``.

    Raises ``InvalidRequest``, which names the file or flag.
    """
    choice = _choose(config)
    return choice.card, choice.described


def _choose(config: WorkerConfig) -> _Choice:
    card = model_files.read_card(config.model, config.served_model_name, weights=config.load_format != "dummy")
    raw, described, reason = read_described(card.directory, config)
    limit = _max_context(config, described.max_context_tokens)
    return _Choice(card, raw, replace(described, max_context_tokens=limit), reason)


def make_model(
    config: ChosenWorkerConfig,
    described: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ranks: Ranks,
    layers: range,
    *,
    memory: torch.device | None = None,
) -> DecoderModel:
    """Return a rank's ``layers`` of the model with uninitialised weights.

    ``memory`` is the device of the tensors, by default ``device``.
    """
    local = local_config(described, ranks, layers)
    makers = None
    if config.quantization == "checkpoint":
        makers = [make_kept_linears(each, dtype, device) for each in layer_forms(described, ranks, layers)]
    if _uses_panels(config, local, dtype, device, ranks):
        linear: LinearMaker = partial(PanelLinear, dtype=dtype)
        dtype = torch.float32  # of activations, for which the layers have compiled operators
    else:
        linear = make_linear(local, dtype, device, config.quantization, ranks.tp_size)
    kernels = make_kernels(device, dtype, compiled=config.torch_compile)
    adds = device.type == "cuda" and config.quantization == "none" and ranks.tp_size == 1
    where = memory or device
    return DecoderModel(
        described, dtype, where, kernels, linear, makers, adds_in_product=adds, ranks=ranks, layers=layers
    )


def _uses_panels(
    config: ChosenWorkerConfig, local: ModelConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks
) -> bool:
    """Return whether the layers are ``PanelLinear``: on a CPU, where the compiled decoder can run the model."""
    if device.type != "cpu" or dtype not in TOGETHER or config.quantization != "none" or config.torch_compile:
        return False
    from services.worker.layers import products_cpu  # noqa: F401  the operator; loads numba
    from services.worker.models.fused_cpu import supports_layers  # loads numba

    divides = local.hidden_size % TOGETHER[dtype] == local.intermediate_size % TOGETHER[dtype] == 0
    return ranks.alone and divides and supports_layers(local)


def _max_context(config: WorkerConfig, model_limit: int) -> int:
    if config.max_context_tokens is None:
        return model_limit
    if config.max_context_tokens > model_limit:
        raise InvalidRequest(
            f"flag max_context_tokens={config.max_context_tokens}: the model's own limit is {model_limit};"
            " lower it or leave it out",
            field="max_context_tokens",
        )
    return config.max_context_tokens
