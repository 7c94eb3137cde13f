"""The attention that each layer of a model asks for, found by a run of the model without weights.

A model that asks for something else than the worker's attention computes is refused by name.
"""

import copy
import threading
from bisect import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from services.common.boundaries import errors_to
from services.worker.models.foreign import products
from services.worker.models.foreign.numbering import RecordedNumbering, calls_of
from services.worker.models.foreign.products import OwnCode
from services.worker.models.foreign.skeleton import base_of, first_line, inputs_of, refuse

_PROBE = "tokasaurus_probe"  # name of the attention function that records its calls
_PROBE_STEP = "tokasaurus_probe_step"  # name of the same function for a run without masks
_PROBE_PRODUCTS = "tokasaurus_probe_products"  # name of the masks of a model that computes its attention itself
_MOST_TOKENS = 31
# Arguments of attention functions that change no scores, or that ``_Call`` reads.
_READ = ("scaling", "sliding_window", "softcap", "s_aux", "is_causal", "dropout")
_WITHOUT_EFFECT = (
    "position_ids",
    "cache_position",
    "use_cache",
    "output_attentions",
    "output_router_logits",
    "layer_idx",
)
# Architectures that ran, but not always with the tokens of transformers, for an unknown reason.
_OTHER_ANSWERS = frozenset({"DoryForCausalLM"})
# Modules that pass values from token to token outside the attention.
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)

_recorded = threading.local()


class _Unsupported(Exception):
    """A property of the attention that the worker does not compute."""


@dataclass(frozen=True)
class MaskRules:
    """Object that a model gets instead of a mask: tokens attend to themselves and to the tokens before them."""

    window: int | None  # most recent tokens that a token attends to; None = all
    chunk: int | None = None  # tokens attend to those of the same chunk of this size only; None = to all
    supported: bool = True  # false for a mask of another kind
    readable: bool = True  # false for a mask whose values the run did not compute

    def first(self, query: int) -> int:
        """Return the first token to which the token ``query`` attends."""
        if self.chunk is not None:
            return query // self.chunk * self.chunk
        return 0 if self.window is None else max(0, query - self.window + 1)

    def __getitem__(self, index: tuple[slice, ...]) -> "MaskRules":
        """Return the same rules for all rows and columns. Raises ``TypeError`` for a part of the mask."""
        if all(each in (slice(None), slice(0, None)) for each in index):
            return self
        raise TypeError(f"a part of {type(self).__name__} has other rules")


@dataclass(frozen=True)
class AttentionCall:
    """The attention of one layer."""

    module: nn.Module
    heads: int
    kv_heads: int
    head_dim: int  # elements of a head of queries and keys
    value_dim: int  # elements of a head of values
    scale: float
    window: int | None = None
    chunk: int | None = None  # tokens attend to those of the same chunk of this size only; it is ``window`` too
    soft_cap: float | None = None
    # what a step to the next key adds to the score, by head; None = nothing
    slopes: tuple[float, ...] | None = None
    products: bool = False  # the code of ``module`` computes the attention itself, see ``products``
    sinks: str | None = None  # name of the parameter of ``module`` with the score of each head's sink


class Probed(NamedTuple):
    """The result of the runs without weights."""

    calls: list[AttentionCall]  # the attention of each layer, in the order in which they run
    numbering: frozenset[int] = frozenset()  # the calls of ``arange`` that count positions, see ``numbering``


def probe(model: Any, architecture: str, max_tokens: int) -> Probed:
    """Return the attention of each layer of ``model``, and how it counts positions.

    ``model`` is from ``make_skeleton``. Contexts have at most ``max_tokens`` tokens. Raises ``InvalidRequest`` if the
    worker cannot run the model.
    """
    AttentionInterface.register(_PROBE, _record)
    AttentionInterface.register(_PROBE_STEP, _record)
    AttentionMaskInterface.register(_PROBE, _mask_rules)
    ALL_EXPERTS_FUNCTIONS.register(_PROBE, _without_experts)
    _refuse_mixing(model, architecture)
    _recorded.most = max_tokens
    errors: list[BaseException] = []
    # On the CPU if the model reads values, for example to count the tokens of each expert.
    for device in (torch.device("meta"), torch.device("cpu")):
        errors.clear()
        with errors_to(errors.append):
            calls = _run(model, device)
            if calls:
                numbering = _numbering(model, device)
        if not errors and calls:
            _refuse_positions(model, architecture, numbering)
            _refuse_shared_layers(model, calls, architecture)
            _refuse_shorter_cache(model, calls, architecture)
            if architecture in _OTHER_ANSWERS:
                refuse(architecture, "its answers would differ from those of transformers")
            return Probed(calls, numbering)
        if not errors or isinstance(errors[0], _Unsupported):
            break
    if not any(isinstance(error, _Unsupported) for error in errors):
        with errors_to(errors.append):
            return Probed(_run_products(model, max_tokens))
    for error in errors:
        if isinstance(error, _Unsupported):
            refuse(architecture, str(error))
        if isinstance(error, OwnCode):
            refuse(architecture, f"its attention does not use the interface of transformers, and {error}", error)
        if isinstance(error, TypeError | AttributeError) and MaskRules.__name__ in str(error):
            refuse(architecture, "it computes with the mask of its attention", error)
    refuse(architecture, f"transformers cannot run it on a flattened batch ({first_line(errors[0])})", errors[0])


def _numbering(model: Any, device: torch.device) -> frozenset[int]:
    """Return the calls of ``arange`` that count positions in a step of ``model``."""
    _run(model, device, _PROBE_STEP)
    found: frozenset[int] = _recorded.numbering
    return found


def _run_products(model: Any, max_tokens: int) -> list[AttentionCall]:
    """Return the attention that the code of ``model`` computes itself, found with known scores.

    Raises ``OwnCode``, and any exception of the model.
    """
    copied = copy.deepcopy(model)
    products.use_masks(copied, _PROBE_PRODUCTS)
    AttentionMaskInterface.register(_PROBE_PRODUCTS, _plain_mask)
    originals = dict(zip(copied.modules(), model.modules(), strict=True))
    tokens = products.tokens_of(model, max_tokens)
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=products.META)
    inputs = inputs_of(token_ids, torch.zeros_like(token_ids))
    whole = torch.ones(1, tokens, dtype=torch.int64)
    mode = products.KnownScores(tokens)
    with torch.inference_mode(), products.named_modules_of(copied, mode), mode:
        base_of(copied)(**inputs, attention_mask=whole)
    mode.finish()
    for call in mode.calls:
        if products.hidden_window(call.module, tokens):
            raise OwnCode("its window is too large to find what its attention computes")
    products.use_masks(model, products.NAME)
    return [
        AttentionCall(
            module=originals[call.module],
            heads=call.query[1],
            kv_heads=call.key[1],
            head_dim=call.query[3],
            value_dim=call.value[3],
            scale=call.scale,
            window=call.window,
            slopes=call.slopes,
            products=True,
        )
        for call in mode.calls
    ]


def _plain_mask(*, mask_function: Any, q_length: int, dtype: torch.dtype, **given: Any) -> torch.Tensor:
    """Return the mask of a causal model for known scores, which are on the CPU. Raises ``OwnCode``."""
    if _mask_rules(mask_function=mask_function) != MaskRules(None):
        raise OwnCode("its attention has windows or another mask of its own")
    mask = torch.full((q_length, q_length), torch.finfo(dtype).min, dtype=dtype).triu(1)
    return mask[None, None]


def _run(
    model: Any, device: torch.device, implementation: str = _PROBE, *, cached: bool = False
) -> list[AttentionCall]:
    """Run a copy of ``model`` on ``device``, without values or with zeros, and return the calls of its attention.

    With ``cached``, the model has a cache, and ``_recorded.cache`` records how it is used. With ``_PROBE_STEP`` as
    ``implementation``, the model runs as in a step, without masks. A run may change a module, for example move tensors
    to the device. Raises ``_Unsupported``, and any exception of the model.
    """
    copied = copy.deepcopy(model)
    if device.type == "meta":
        copied.to(device)
    else:  # zeros that take no memory
        for name, parameter in list(copied.named_parameters()):
            path, _, last = name.rpartition(".")
            zeros = torch.zeros(1, dtype=parameter.dtype).expand(parameter.shape)
            copied.get_submodule(path).register_parameter(last, nn.Parameter(zeros, requires_grad=False))
    copied.tie_weights()
    copied.set_attn_implementation(implementation)
    copied.set_experts_implementation(_PROBE)
    _recorded.calls = []
    _recorded.modules = dict(zip(copied.modules(), model.modules(), strict=True))
    _recorded.cache = _RecordedCache(config=copied.config) if cached else None
    given = {} if _recorded.cache is None else {_cache_argument(copied): _recorded.cache, "use_cache": True}
    tokens = products.tokens_of(model, _recorded.most, _MOST_TOKENS)
    _recorded.numbering = frozenset()
    token_ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    if implementation == _PROBE:
        # With a mask of padding, transformers does not look for several sequences among the positions.
        given["attention_mask"] = torch.ones(1, tokens, dtype=torch.int64, device=device)
    inputs = {**inputs_of(token_ids, torch.arange(tokens, device=device)), **given}
    with torch.inference_mode(), RecordedNumbering(tokens):
        made = base_of(copied)(**inputs)
    _recorded.numbering |= calls_of(made.last_hidden_state)
    return [_call(*recorded) for recorded in _recorded.calls]


def _mask_rules(*, mask_function: Any, **_: Any) -> MaskRules:
    """Return the rules of the mask ``mask_function(batch, head, query, key)``.

    Models also make masks that no layer uses. They may not be computable.
    """
    found = [MaskRules(None, readable=False)]
    with errors_to(lambda error: None):
        found.append(_readable_rules(mask_function, _recorded.most))
    return found[-1]


def _readable_rules(mask_function: Any, most: int) -> MaskRules:
    """Return the rules of a mask that has values. A context has ``most`` tokens."""
    keys = torch.arange(most + 1)

    def seen(query: int) -> torch.Tensor:
        row: torch.Tensor = mask_function(0, 0, torch.tensor(query), keys) & (keys >= 0)
        return row

    # The first token that does not attend to token 0.
    limit = bisect(range(most), x=False, key=lambda query: not bool(seen(query)[0]))
    rules = [MaskRules(None)] if limit >= most else [MaskRules(limit), MaskRules(limit, chunk=limit)]
    queries = {limit - 1, limit, limit + 1, 2 * limit - 1, 2 * limit, 2 * limit + 1, most // 2, most - 1}
    for query in queries & set(range(most)):
        row = seen(query)
        rules = [each for each in rules if torch.equal(row, (keys >= each.first(query)) & (keys <= query))]
    return rules[0] if rules else MaskRules(None, supported=False)


def _without_experts(module: nn.Module, hidden: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden)


def _record(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Record a call of the attention function, and return zeros."""
    _recorded.numbering |= calls_of(query) | calls_of(key) | calls_of(value)
    names = [name for name, parameter in module.named_parameters() if parameter is settings.get("s_aux")]
    _recorded.calls.append(
        (_recorded.modules[module], query.shape, key.shape, value.shape, attention_mask, settings, names)
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _call(
    module: nn.Module,
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    mask: object,
    settings: Mapping[str, Any],
    sinks: Sequence[str],
) -> AttentionCall:
    """Return the description of a recorded call. ``sinks`` names the parameter ``s_aux``. Raises ``_Unsupported``."""
    others = {
        name: given
        for name, given in settings.items()
        if given is not None and given is not False and name not in (*_READ, *_WITHOUT_EFFECT)
    }
    if others:
        raise _Unsupported(f"its attention has {', '.join(sorted(others))}, which the worker's attention does not have")
    if settings.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise _Unsupported("its attention also reads later tokens")
    if isinstance(mask, MaskRules) and not mask.readable:
        raise ValueError("the mask of its attention has no values")
    if isinstance(mask, MaskRules) and not mask.supported:
        raise _Unsupported("its attention has a mask of its own")
    if not (mask is None or isinstance(mask, MaskRules)):
        raise _Unsupported("it adds a mask or a bias of its own to the scores")
    if query[0] != 1 or not query[2] == key[2] == value[2] or query[1] % key[1] or key[3] != query[3]:
        raise _Unsupported(f"its attention has queries of shape {list(query)} and keys of shape {list(key)}")
    if settings.get("s_aux") is not None and not sinks:
        raise _Unsupported("the sinks of its attention are computed at each step")
    window = mask.window if isinstance(mask, MaskRules) else settings.get("sliding_window")
    scale, soft_cap = settings.get("scaling"), settings.get("softcap")
    if not all(each is None or isinstance(each, int | float) for each in (scale, soft_cap, window)):
        raise _Unsupported("the scale, cap or window of its attention is computed at each step")
    return AttentionCall(
        module=module,
        heads=query[1],
        kv_heads=key[1],
        head_dim=query[3],
        value_dim=value[3],
        scale=query[3] ** -0.5 if scale is None else float(scale),
        window=window or None,
        chunk=mask.chunk if isinstance(mask, MaskRules) else None,
        soft_cap=soft_cap or None,
        sinks=sinks[0] if sinks else None,
    )


def _refuse_mixing(model: Any, architecture: str) -> None:
    if base_of(model) is model:
        refuse(architecture, "its code has no part without the vocabulary head")
    if getattr(model, "_is_stateful", False):
        refuse(architecture, "it has state-space, recurrent or linear-attention layers")
    if model.config.is_encoder_decoder:
        refuse(architecture, "it has an encoder")
    for name, module in model.named_modules():
        if isinstance(module, _MIXING):
            refuse(architecture, f"{name} is a {type(module).__name__}, which mixes tokens outside the attention")


class _RecordedCache(DynamicCache):  # type: ignore[misc]  # the class has no types
    """Cache that records the layers that are updated, and stores nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.updated: list[int] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.updated.append(layer_idx)
        return key_states, value_states


def _cache_argument(model: Any) -> str:
    """Return the name of the argument of the base for the cache, which depends on the version of transformers."""
    return next(name for name in ("cache", "past_key_values") if name in signature(base_of(model).forward).parameters)


def _refuse_shared_layers(model: Any, calls: Sequence[AttentionCall], architecture: str) -> None:
    """Refuse models that run a layer several times in a step, and cache the keys of one of these runs only."""
    modules = [call.module for call in calls]
    if len(set(modules)) == len(modules):
        return
    errors: list[Exception] = []
    with errors_to(errors.append):
        _run(model, torch.device("meta"), cached=True)
    updated = [] if errors else _recorded.cache.updated
    # Calls of one run of a module follow each other.
    runs = len(list(groupby(modules)))
    if len(set(updated)) < runs:
        refuse(architecture, "a layer runs several times in a step, and the runs share the keys in the cache")


def _refuse_shorter_cache(model: Any, calls: Sequence[AttentionCall], architecture: str) -> None:
    """Refuse models whose answers in transformers depend on a cache that forgets tokens to which a layer attends."""
    layers = DynamicCache(config=model.config).layers
    for call, layer in zip(calls, layers, strict=False):
        kept = getattr(layer, "sliding_window", None)
        if len(layers) == len(calls) and kept is not None and kept < min(_recorded.most, call.window or _recorded.most):
            refuse(architecture, f"its cache keeps {kept} tokens (sliding_window), and its layers attend to more")


def _refuse_positions(model: Any, architecture: str, numbering: Collection[int]) -> None:
    if not numbering and "position_ids" not in signature(base_of(model).forward).parameters:
        refuse(architecture, "its code takes no position_ids")
