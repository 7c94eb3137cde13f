"""The source of a model that transformers computes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from services.common.config import ChosenWorkerConfig
from services.worker.described.config import ModelConfig
from services.worker.described.foreign import refuse_layer_types
from services.worker.described.ranks import Ranks
from services.worker.layers.factory import make_kernels
from services.worker.models.base import ModelSource, RankModel
from services.worker.models.foreign import loading
from services.worker.models.foreign.model import ForeignModel, describe, refuse_uncompilable
from services.worker.models.foreign.probe import probe
from services.worker.models.foreign.rotations import depends_on_position, fix_rotations
from services.worker.models.foreign.skeleton import make_skeleton


class ForeignSource(ModelSource):
    """A directory with a model that transformers computes. It makes one ``ForeignModel``."""

    def __init__(self, directory: Path, raw: Mapping[str, Any], described: ModelConfig, dtype: torch.dtype) -> None:
        """Record the arguments that the layers pass to their attention. ``raw`` is the content of ``config.json``.

        ``described`` is the estimate of ``read_foreign``. Raises ``InvalidRequest`` if the worker cannot run the model.
        """
        name = described.foreign or ""
        self._directory, self._skeleton = directory, make_skeleton(raw, name, dtype)
        # Some configs in transformers derive the types of layers from other keys.
        refuse_layer_types(getattr(self._skeleton.config, "layer_types", None) or (), name)
        fix_rotations(self._skeleton, name, described.max_context_tokens)
        self._probed = probe(self._skeleton, name, described.max_context_tokens)
        self.described = describe(described, self._skeleton, self._probed.calls)

    def check(self) -> None:
        loading.check(self._directory, self._skeleton)

    def make(
        self,
        config: ChosenWorkerConfig,
        described: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks,
        layers: range,
    ) -> ForeignModel:
        if config.torch_compile:
            refuse_uncompilable(self._probed, described.foreign or "", rotates=depends_on_position(self._skeleton))
        # The operator for CPUs reads values, so it cannot be compiled. That of transformers can.
        in_graph = config.torch_compile and device.type == "cpu"
        kernels = None if in_graph else make_kernels(device, dtype, compiled=config.torch_compile)
        return ForeignModel(described, self._skeleton, self._probed, dtype, device, kernels)

    def fill(self, model: RankModel, *, dummy: bool) -> None:
        if dummy:
            loading.load_dummy(self._skeleton, model.device, seed=0)
        else:
            loading.load(self._directory, self._skeleton, model.device)
