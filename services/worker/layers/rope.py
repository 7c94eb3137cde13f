"""The rotation of positions that ``config.json`` describes. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.context_length import rope_parameters
from services.common.errors import InvalidRequest

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class RopeSettings:
    """The settings of a rotation, named as in ``config.json``. A kind reads those that belong to it."""

    kind: str  # ``rope_type``, one of KINDS
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 8192  # tokens; for dynamic: ``max_position_embeddings``
    attention_factor: float = 1.0  # yarn and longrope: cosines and sines are multiplied by it
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, [head_dim / 2]
    long_factor: tuple[float, ...] = ()  # longrope, [head_dim / 2]


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    """Return the rotation's settings, with transformers' defaults for those that the config leaves out.

    Raises ``InvalidRequest`` for a kind that is not supported or lacks a setting.
    """
    settings = rope_parameters(config)
    theta = settings.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = settings["rope_type"]
    if kind not in KINDS:
        raise InvalidRequest(
            f"config.json: rope type {kind!r} is not supported; {', '.join(KINDS[:-1])} and {KINDS[-1]} are",
            field="model",
        )
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise InvalidRequest(f"config.json: partial_rotary_factor={partial} is not supported; only 1 is", field="model")
    if head_dim % 2:
        raise InvalidRequest(f"config.json: head_dim={head_dim} is odd, so it cannot be rotated", field="model")
    try:
        return _READERS[kind](theta, settings, config, head_dim)
    except KeyError as error:
        raise InvalidRequest(
            f"config.json: rope type {kind!r} needs {error.args[0]}, which is missing", field="model"
        ) from error


def has_long_factors(rope: RopeSettings, max_tokens: int) -> bool:
    """Return whether ``longrope`` has its long factors where contexts of up to ``max_tokens`` are served."""
    return max_tokens > rope.original_max_position_embeddings


def describe_scaling(rope: RopeSettings, max_tokens: int) -> str:
    """Return a sentence for the log: how positions of contexts of up to ``max_tokens`` tokens are scaled."""
    original = rope.original_max_position_embeddings
    if rope.kind == "dynamic":
        return f"by each position's own length beyond {original} tokens"
    if rope.kind == "longrope" and has_long_factors(rope, max_tokens):
        return f"long factors for all positions; max_context_tokens={original} or less has the short ones"
    if rope.kind == "longrope":
        return "short factors for all positions"
    return "none" if rope.kind == "default" else f"factor {rope.factor:g}"


def _default(theta: float, settings: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    return RopeSettings("default", theta)


def _linear(theta: float, settings: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    return RopeSettings("linear", theta, settings["factor"])


def _dynamic(theta: float, settings: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    return RopeSettings("dynamic", theta, settings["factor"], config.get("max_position_embeddings", 2048))


def _llama3(theta: float, settings: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    return RopeSettings(
        "llama3",
        theta,
        settings["factor"],
        settings["original_max_position_embeddings"],
        low_freq_factor=settings["low_freq_factor"],
        high_freq_factor=settings["high_freq_factor"],
    )


def _yarn(theta: float, settings: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    original, factor = settings["original_max_position_embeddings"], settings["factor"]
    if factor is None:
        factor = config["max_position_embeddings"] / original
    attention_factor, mscale, all_dims = (
        settings.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention_factor is None and mscale and all_dims:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dims)
    return RopeSettings(
        "yarn",
        theta,
        factor,
        original,
        _mscale(factor) if attention_factor is None else attention_factor,
        beta_fast=settings.get("beta_fast") or 32,
        beta_slow=settings.get("beta_slow") or 1,
        truncate=settings.get("truncate", True),
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(theta: float, settings: dict[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    original, factor = settings["original_max_position_embeddings"], settings.get("factor")
    if factor is None:
        factor = config.get("max_position_embeddings", original) / original
    attention_factor = settings.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    for name in ("short_factor", "long_factor"):
        if len(settings[name]) != head_dim // 2:
            raise InvalidRequest(
                f"config.json: {name} has {len(settings[name])} entries; expected {head_dim // 2}, half of"
                f" head_dim={head_dim}",
                field="model",
            )
    return RopeSettings(
        "longrope",
        theta,
        factor,
        original,
        attention_factor,
        short_factor=tuple(settings["short_factor"]),
        long_factor=tuple(settings["long_factor"]),
    )


_READERS = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
}
