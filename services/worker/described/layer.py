"""The description of one decoder layer, from which implementations of a layer are chosen and built.

A new feature is a new field, or a new value of a field. The default of a new field means that the feature is absent. An
implementation that does not declare the field or the value then declines the layer; see ``undeclared``.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

# Values of the fields below that an implementation computes, by name. No two fields have the same name.
SupportedValues: TypeAlias = Mapping[str, Container[object]]
# silu, gelu (with erf), gelu_tanh and relu are as in torch. relu_squared is ``max(x, 0) ** 2``. clamped_swiglu is the
# gated unit of gpt-oss: ``(clamp(up, -7, 7) + 1) * gate * sigmoid(1.702 * gate)`` with a gate of at most 7.
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped_swiglu"]


@dataclass(frozen=True)
class AttentionConfig:
    """Features of the self-attention of one layer, without sizes."""

    qkv_bias: bool = False
    output_bias: bool = False
    # RMS norm of q and k, before the rotation: of each head, or of all heads together
    qk_norm: Literal["none", "per_head", "whole"] = "none"
    rope: int | None = 0  # index of the rotation in ``ModelConfig.ropes``; None = q and k are not rotated
    window: int | None = None  # most recent tokens that a token attends to, itself included; None = all tokens
    scale: float | None = None  # factor of the scores; None = head_dim ** -0.5, with the head_dim of the checkpoint
    soft_cap: float | None = None  # scores become cap * tanh(score / cap); None = they are not capped
    sinks: bool = False  # a learned score per head takes part in the softmax, and has no value


@dataclass(frozen=True)
class MlpConfig:
    """Features of the dense MLP of one layer. Its width is ``ModelConfig.intermediate_size``."""

    kind: Literal["gated", "plain"] = "gated"  # down(activation(gate(x)) * up(x)), or down(activation(up(x)))
    activation: Activation = "silu"
    mlp_bias: bool = False  # in all products


@dataclass(frozen=True)
class RouterConfig:
    """Rules by which a router chooses and weighs the experts of a token, from ``logits = x @ router.T``."""

    # softmax over all experts, softmax over the chosen ones, or a sigmoid of each logit
    scores: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    normalized: bool = False  # the weights of the chosen experts are divided by their sum
    correction_bias: bool = False  # a learned bias is added to the scores for the choice, and not to the weights
    groups: int = 1  # the experts form this number of equal groups, ...
    chosen_groups: int = 1  # ... of which the ones with the largest sum of their two best scores are considered
    scale: float = 1.0  # factor of the weights
    bias: bool = False  # of the product


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts, which replaces an MLP. Each expert is a gated MLP."""

    count: int
    chosen: int  # experts per token
    width: int  # intermediate size of an expert
    router: RouterConfig = RouterConfig()
    activation: Activation = "silu"
    expert_bias: bool = False  # in all products of the experts
    shared_width: int = 0  # width of a gated MLP that every token passes in addition; 0 = there is none
    shared_gate: bool = False  # its result is multiplied by a sigmoid of a learned product
    held: range | None = None  # the experts of a rank that has only some of them, see ``shares``; None = all

    @property
    def local(self) -> range:
        """The experts of this rank."""
        return range(self.count) if self.held is None else self.held


@dataclass(frozen=True)
class LayerConfig:
    """Features of one decoder layer, without sizes. The defaults describe a layer of Llama."""

    norm: Literal["rms"] = "rms"
    # of the inputs of attention and MLP, of their outputs, or of both
    norm_placement: Literal["before", "after", "both"] = "before"
    attention: AttentionConfig = AttentionConfig()
    mlp: MlpConfig | ExpertsConfig = MlpConfig()


LLAMA_LAYER = LayerConfig()


def has_mlp_bias(layer: LayerConfig) -> bool:
    """Return whether the last product of the MLP, or of the experts, adds a bias."""
    return layer.mlp.mlp_bias if isinstance(layer.mlp, MlpConfig) else layer.mlp.expert_bias


class AnyValue:
    """Container of all values."""

    def __contains__(self, value: object) -> bool:
        return True


def undeclared(config: LayerConfig | AttentionConfig | MlpConfig, supported: SupportedValues) -> list[str]:
    """Return the fields of ``config`` whose values are not in ``supported``, the declaration of an implementation.

    A field without an entry in ``supported`` must have its default. An implementation therefore declines every feature
    that was added after its declaration, instead of computing a wrong result. A mixture of experts is one value, of the
    field ``mlp``.
    """
    missing: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) in (AttentionConfig, MlpConfig):
            missing += undeclared(value, supported)
        elif value not in supported.get(field.name, (field.default,)):
            missing.append(field.name)
    return missing
