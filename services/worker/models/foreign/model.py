"""A model whose layers transformers computes, in the form in which the runners use models."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from services.worker.attention.base import AttentionStep, LayerAttention, RotatingAttentionStep
from services.worker.attention.compiled import TraceableRotation, TraceableStep
from services.worker.described.config import ModelConfig, Windows
from services.worker.described.layer import ExpertsConfig
from services.worker.described.ranks import ALONE as ONE_RANK
from services.worker.layers.kernels import LayerKernels
from services.worker.models.base import Compile, RankModel
from services.worker.models.foreign import attention as attention_function
from services.worker.models.foreign.experts import OPERATOR, activation_of, matrices_of
from services.worker.models.foreign.probe import AttentionCall, base_of, inputs_of
from services.worker.parallel.exchange import ALONE, Exchange


class NoRotation(NamedTuple):
    """Tables of a rotation that no layer uses: transformers rotates queries and keys itself."""

    cos: torch.Tensor  # [max_tokens, 0]; its length is the longest context
    sin: torch.Tensor


class _Hidden:
    """The result of a base that returned ``last_hidden_state [1, rows, hidden_size]``, and nothing else."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        """Return None for the values that a base may return in addition."""

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state,)[index]


class _GivenHidden(nn.Module):
    """A substitute for the base, and for the parts of it that some heads call. It returns its input."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._parts = {name for name, _ in base.named_children()}

    def __getattr__(self, name: str) -> Any:
        """Return this substitute for a part of the base."""
        return self if name in self.__dict__.get("_parts", ()) else super().__getattr__(name)

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> _Hidden:
        return _Hidden(inputs_embeds)


class ForeignModel(RankModel):
    """A model of transformers with all of its layers on one device. ``loading`` fills the weights."""

    ranks = ONE_RANK
    quantizes = False
    may_wait = True
    first = last = True

    def __init__(
        self,
        config: ModelConfig,
        skeleton: Any,
        calls: list[AttentionCall],
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels | None,
    ) -> None:
        """Take ``skeleton`` and its attention ``calls``, which ``config`` describes, as ``laid_out`` for ``device``."""
        super().__init__()
        self.config = self.local = config
        self.dtype, self.device = dtype, device
        self.skeleton, self.base = skeleton, base_of(skeleton)
        self._run_base: Callable[..., Any] = self.base.__call__
        self.windows: Windows = config.windows
        self.layer_range = range(len(config.layers))
        nothing = torch.empty(config.max_context_tokens, 0, device=device)
        self.rotaries = [NoRotation(nothing, nothing)]
        self._calls = calls
        for layer, call in enumerate(calls):
            setattr(call.module, attention_function.LAYER, layer)
            setattr(call.module, attention_function.HEAD_DIM, config.head_dim)
        for module in skeleton.modules():
            if kernels is not None and (activation := activation_of(module)) is not None:
                setattr(module, OPERATOR, (kernels, activation))
        # The vocabulary head, with all that the architecture does to logits.
        self._head = copy.copy(skeleton)
        modules = dict(skeleton.named_children()) | {skeleton.base_model_prefix: _GivenHidden(self.base)}
        self._head.__dict__["_modules"] = modules  # the copy shares everything else

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        with attention_function.running(attention):
            hidden: torch.Tensor = self._run_base(**inputs_of(inputs.long(), positions.long())).last_hidden_state[0]
        return hidden if keep is None else hidden.index_select(0, keep)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    def compile_layers(self, compiled: Compile) -> None:
        config, on_cuda = self.config, self.device.type == "cuda"
        proxy = TraceableRotation(config.heads * config.head_dim) if on_cuda else TraceableStep()
        for call in self._calls:
            object.__setattr__(call.module, attention_function.PROXY, proxy)  # it is no part of the module
        self._run_base = compiled(self.base.forward, 1)

    def attention_layers(self) -> list[LayerAttention]:
        return [_rules(call) for call in self._calls]


def describe(config: ModelConfig, skeleton: Any, calls: list[AttentionCall]) -> ModelConfig:
    """Return ``config`` with the sizes and layers that the model has."""
    features = [
        replace(
            layer,
            attention=replace(
                layer.attention,
                rope=None,
                window=call.window,
                scale=call.scale,
                soft_cap=call.soft_cap,
                sinks=call.sinks is not None,
            ),
        )
        for layer, call in zip((config.layers * len(calls))[: len(calls)], calls, strict=True)
    ]
    matrices = [matrices_of(module) for module in skeleton.modules() if activation_of(module) is not None]
    if matrices:
        count, _, width = matrices[0][1].shape
        features = [
            replace(layer, mlp=replace(layer.mlp, count=count, width=width))
            if isinstance(layer.mlp, ExpertsConfig)
            else layer
            for layer in features
        ]
    embedding = skeleton.get_input_embeddings().weight
    return replace(
        config,
        layers=tuple(features),
        heads=calls[0].heads,
        kv_heads=calls[0].kv_heads,
        head_dim=max(max(call.head_dim, call.value_dim) for call in calls),
        hidden_size=_hidden_size(skeleton, embedding),
        ropes=(),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
    )


def _hidden_size(skeleton: Any, embedding: torch.Tensor) -> int:
    """Return the size of the input of the vocabulary head."""
    head = skeleton.get_output_embeddings()
    size: int = (embedding if head is None else head.weight).shape[-1]
    return size


def _rules(call: AttentionCall) -> LayerAttention:
    sinks = None if call.sinks is None else call.module.get_parameter(call.sinks).float()
    return LayerAttention(call.scale, call.window, call.soft_cap, sinks, rope=None)
