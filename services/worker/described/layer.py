"""The description of one decoder layer, from which implementations of a layer are chosen and built.

A new feature is a new field, or a new value of a field. The default of a new field means that the feature is absent. An
implementation that does not declare the field or the value then declines the layer; see ``undeclared``.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias

# Values of the fields below that an implementation computes, by name. No two fields have the same name.
SupportedValues: TypeAlias = Mapping[str, Container[object]]


@dataclass(frozen=True)
class AttentionConfig:
    """Features of the self-attention of one layer, without sizes."""

    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "per_head"] = "none"  # RMS norm of q and k, before the rotation
    rotation: Literal["halves"] = "halves"  # element i of a head turns with element i + head_dim / 2
    window: int | None = None  # most recent tokens that a token attends to, itself included; None = all tokens


@dataclass(frozen=True)
class MlpConfig:
    """Features of the MLP of one layer, without sizes."""

    kind: Literal["gated"] = "gated"  # down(activation(gate(x)) * up(x))
    activation: Literal["silu"] = "silu"
    mlp_bias: bool = False  # in all three products


@dataclass(frozen=True)
class LayerConfig:
    """Features of one decoder layer, without sizes. The defaults describe a layer of Llama."""

    norm: Literal["rms"] = "rms"
    norm_placement: Literal["before"] = "before"  # before the attention and before the MLP
    attention: AttentionConfig = AttentionConfig()
    mlp: MlpConfig = MlpConfig()


LLAMA_LAYER = LayerConfig()


class AnyValue:
    """Container of all values."""

    def __contains__(self, value: object) -> bool:
        return True


def undeclared(config: LayerConfig | AttentionConfig | MlpConfig, supported: SupportedValues) -> list[str]:
    """Return the fields of ``config`` whose values are not in ``supported``, the declaration of an implementation.

    A field without an entry in ``supported`` must have its default. An implementation therefore declines every feature
    that was added after its declaration, instead of computing a wrong result.
    """
    missing: list[str] = []
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) in (AttentionConfig, MlpConfig):
            missing += undeclared(value, supported)
        elif value not in supported.get(field.name, (field.default,)):
            missing.append(field.name)
    return missing
