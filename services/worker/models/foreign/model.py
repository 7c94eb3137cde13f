"""A model whose layers transformers computes, in the form in which the runners use models."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from services.common.errors import InvalidRequest
from services.worker.attention.base import AttentionStep, LayerAttention, RotatingAttentionStep
from services.worker.attention.compiled import TraceableRotation, TraceableStep
from services.worker.described.config import ModelConfig, Windows
from services.worker.described.layer import ExpertsConfig
from services.worker.described.ranks import ALONE as ONE_RANK
from services.worker.layers.kernels import LayerKernels
from services.worker.models.base import Compile, RankModel
from services.worker.models.foreign import attention as attention_function
from services.worker.models.foreign.attention import CallLayer, bias_elements, bias_of, same_chunk_of
from services.worker.models.foreign.experts import OPERATOR, activation_of, matrices_of
from services.worker.models.foreign.numbering import StepNumbering
from services.worker.models.foreign.probe import AttentionCall, Probed
from services.worker.models.foreign.products import StepProducts, mark, replacing
from services.worker.models.foreign.skeleton import base_name_of, base_of, inputs_of
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
        probed: Probed,
        dtype: torch.dtype,
        device: torch.device,
        kernels: LayerKernels | None,
    ) -> None:
        """Take ``skeleton`` with its properties, ``probed``. ``config`` describes it as ``laid_out`` for ``device``."""
        super().__init__()
        self.config = self.local = config
        self.dtype, self.device = dtype, device
        self.skeleton, self.base = skeleton, base_of(skeleton)
        self._run_base: Callable[..., Any] = self.base.__call__
        self.windows: Windows = config.windows
        self.layer_range = range(len(config.layers))
        nothing = torch.empty(config.max_context_tokens, 0, device=device)
        self.rotaries = [NoRotation(nothing, nothing)]
        self._calls, self._numbering = probed
        calls = self._calls
        self._products = {call.module for call in calls if call.products}
        for module in self._products:
            mark(module)
        for module, places in places_of(config, calls).items():
            setattr(module, attention_function.CALLS, places)
        for module in skeleton.modules():
            if kernels is not None and (activation := activation_of(module)) is not None:
                setattr(module, OPERATOR, (kernels, activation))
        # The vocabulary head, with all that the architecture does to logits.
        self._head = copy.copy(skeleton)
        modules = dict(skeleton.named_children()) | {base_name_of(skeleton): _GivenHidden(self.base)}
        self._head.__dict__["_modules"] = modules  # the copy shares everything else

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        given = inputs_of(inputs.long(), positions.long())
        with attention_function.running(attention, positions), self._replacing(positions) as added:
            hidden: torch.Tensor = self._run_base(**given, **added).last_hidden_state[0]
        return hidden if keep is None else hidden.index_select(0, keep)

    @contextmanager
    def _replacing(self, positions: torch.Tensor) -> Iterator[Mapping[str, Any]]:
        """Replace parts of the model's code for a step inside the context. Yields further arguments of the base.

        The parts are the products of attention modules, and counts of tokens, which become ``positions [tokens]``.
        """
        if self._numbering:
            with StepNumbering(self._numbering, positions.long()):
                yield {}
            return
        if not self._products:
            yield {}
            return
        mode = StepProducts(
            lambda module, query, key, value: attention_function.attend(module, query, key, value, None)[0]
        )
        with replacing(mode):
            yield {"attention_mask": positions.new_ones(1, len(positions), dtype=torch.int64)}

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
        places = [place for call in places_of(self.config, self._calls).values() for place in call]
        ordered = sorted(places, key=lambda place: place.layer)
        return [_rules(call, place) for call, place in zip(self._calls, ordered, strict=True)]


def cache_heads(calls: Sequence[AttentionCall]) -> tuple[int, int]:
    """Return the heads of keys in the cache, and the heads of queries for each of them, that fit all ``calls``."""
    kv_heads = math.lcm(*(call.kv_heads for call in calls))
    return kv_heads, max(-(-call.heads // kv_heads) for call in calls)


def places_of(config: ModelConfig, calls: Sequence[AttentionCall]) -> dict[nn.Module, tuple[CallLayer, ...]]:
    """Return the layers of the cache that the calls of each attention module use, in the order of the calls."""
    places: dict[nn.Module, tuple[CallLayer, ...]] = {}
    for layer, call in enumerate(calls):
        bias = bias_of(call.slopes, call.scale, config.max_context_tokens) if call.slopes else None
        group, same_chunk = config.heads // config.kv_heads, same_chunk_of(call.scale)
        place = CallLayer(layer, config.kv_heads, group, config.head_dim, bias, call.chunk, same_chunk)
        places[call.module] = (*places.get(call.module, ()), place)
    return places


def refuse_uncompilable(probed: Probed, architecture: str, *, rotates: bool) -> None:
    """Raise ``InvalidRequest`` if steps of a model that was ``probed`` cannot be one compiled graph.

    ``rotates`` is true if rotations have other frequencies for each position.
    """
    reason, calls = None, probed.calls
    if len({call.module for call in calls}) < len(calls):
        reason = "computes attention several times in a layer"
    elif any(call.products for call in calls):
        reason = "computes attention in code of its own"
    elif any(call.chunk for call in calls):
        reason = "has attention by chunks"
    elif probed.numbering:
        reason = "counts positions itself"
    elif rotates:
        reason = "has rotations of rope_type 'dynamic'"
    if reason is not None:
        raise InvalidRequest(
            f"flag torch_compile=T: {architecture} {reason}, which cannot be compiled; use torch_compile=F",
            field="torch_compile",
        )


def _added_elements(call: AttentionCall, config: ModelConfig) -> int:
    """Return how many elements of a head the worker adds to those of the model."""
    return (bias_elements(config.max_context_tokens) if call.slopes else 0) + (1 if call.chunk else 0)


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
    kv_heads, group = cache_heads(calls)
    return replace(
        config,
        layers=tuple(features),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=max(max(call.head_dim + _added_elements(call, config), call.value_dim) for call in calls),
        hidden_size=_hidden_size(skeleton, embedding),
        ropes=(),
        parameters=sum(parameter.numel() for parameter in skeleton.parameters()),
    )


def _hidden_size(skeleton: Any, embedding: torch.Tensor) -> int:
    """Return the size of the input of the vocabulary head."""
    head = skeleton.get_output_embeddings()
    size: int = (embedding if head is None else head.weight).shape[-1]
    return size


def _rules(call: AttentionCall, place: CallLayer) -> LayerAttention:
    sinks = None
    if call.sinks is not None:
        scores = call.module.get_parameter(call.sinks).float()
        sinks = attention_function.spread_queries(scores[None, :, None], call.kv_heads, place)[0, :, 0]
    return LayerAttention(call.scale, call.window, call.soft_cap, sinks, rope=None)
