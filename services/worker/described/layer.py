"""The description of one decoder layer.

A new feature is a new field, or a new value of a field. The default of a new field means that the feature is absent.
"""

from dataclasses import dataclass
from typing import Literal


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
