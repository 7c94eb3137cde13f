"""Settings of the rotary position embedding (RoPE), read from ``config.json``."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model.context_length import max_positions, rope_factor, rope_parameters
from services.common.model.json_object import JsonObject

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
_MOST = 1e12  # largest allowed number; larger ones give frequencies that are not finite


@dataclass(frozen=True)
class RopeSettings:
    """Settings of a rotary embedding, named as in ``config.json``. Each kind reads only its own settings."""

    kind: str  # ``rope_type``, one of KINDS
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 8192  # tokens; ``max_position_embeddings`` for dynamic
    attention_factor: float = 1.0  # yarn and longrope; scales cosines and sines
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    short_factor: tuple[float, ...] = ()  # longrope, [rotated elements / 2]
    long_factor: tuple[float, ...] = ()  # longrope, [rotated elements / 2]


def rotated_elements(config: Mapping[str, Any], head_dim: int, default: float | None = None) -> int:
    """Return the number of elements at the start of each head of ``head_dim`` elements that are rotated.

    ``default`` is the value of ``partial_rotary_factor`` if it is absent; None = the architecture rotates whole heads.
    Raises ``InvalidRequest`` if the number is odd, or 0, or the architecture does not have the setting.
    """
    given = rope_parameters(config), JsonObject("config.json", config)
    partials = (each.number_or_none("partial_rotary_factor", most=1.0) for each in given)
    partial = next((partial for partial in partials if partial is not None), 1.0 if default is None else default)
    if default is None and partial != 1.0:
        raise InvalidRequest(
            f"config.json: partial_rotary_factor={partial:g} is not supported for this architecture, which rotates"
            " whole heads; leave it out",
            field="model",
        )
    rotated = int(head_dim * partial)
    if rotated % 2 or not rotated:
        raise InvalidRequest(
            f"config.json: head_dim={head_dim} with partial_rotary_factor={partial:g} gives {rotated} elements, which"
            " cannot be rotated in pairs; expected an even number",
            field="model",
        )
    return rotated


def read_rope(config: Mapping[str, Any], rotated: int) -> RopeSettings:
    """Return the settings of the rotation of ``rotated`` elements, with the defaults of transformers for missing keys.

    Raises ``InvalidRequest`` for a kind that is not supported or lacks a setting, and for several rotations.
    """
    _refuse_nested(config)
    settings, whole = rope_parameters(config), JsonObject("config.json", config)
    # The frequencies are powers of theta, so it must exceed 1.
    thetas = (each.number_or_none("rope_theta", least=1.01, most=_MOST) for each in (settings, whole))
    theta = next((theta for theta in thetas if theta is not None), 10000.0)
    kind = settings.values["rope_type"]
    if kind not in KINDS:
        raise InvalidRequest(
            f"config.json: rope type {reprlib.repr(kind)} is not supported; {', '.join(KINDS[:-1])} and"
            f" {KINDS[-1]} are",
            field="model",
        )
    for name in _NEEDED.get(kind, ()):
        if settings.values.get(name) is None and not (kind == "yarn" and name in settings.values):
            raise InvalidRequest(f"config.json: rope type {kind!r} needs {name}, which is missing", field="model")
    match kind:
        case "linear":
            return RopeSettings("linear", theta, rope_factor(settings) or 1.0)
        case "dynamic":
            return RopeSettings("dynamic", theta, rope_factor(settings) or 1.0, max_positions(config))
        case "llama3":
            return _llama3(theta, settings)
        case "yarn":
            return _yarn(theta, settings, config)
        case "longrope":
            return _longrope(theta, settings, config, rotated)
    return RopeSettings("default", theta)


def has_long_factors(rope: RopeSettings, max_tokens: int) -> bool:
    """Return whether ``longrope`` uses its long factors if contexts have up to ``max_tokens`` tokens."""
    return max_tokens > rope.original_max_position_embeddings


def describe_scaling(rope: RopeSettings, max_tokens: int) -> str:
    """Return a phrase for the log that describes how positions are scaled in contexts of up to ``max_tokens``."""
    original = rope.original_max_position_embeddings
    if rope.kind == "dynamic":
        return f"by each position's own length beyond {original} tokens"
    if rope.kind == "longrope" and has_long_factors(rope, max_tokens):
        return f"long factors for all positions; with max_context_tokens={original} or less, short factors"
    if rope.kind == "longrope":
        return "short factors for all positions"
    return "none" if rope.kind == "default" else f"factor {rope.factor:g}"


def _refuse_nested(config: Mapping[str, Any]) -> None:
    """Raise ``InvalidRequest`` for settings by the type of layer, which only some architectures have."""
    for name in ("rope_parameters", "rope_scaling"):
        settings = JsonObject("config.json", config).object(name).values
        if nested := next((key for key, value in settings.items() if isinstance(value, dict)), None):
            raise InvalidRequest(
                f"config.json: {name} has settings of its own for {reprlib.repr(nested)}, which are not supported for"
                " this architecture; give one rotation for all layers",
                field="model",
            )


def _llama3(theta: float, settings: JsonObject) -> RopeSettings:
    low, high = (settings.number(f"{name}_freq_factor", least=1e-6, most=_MOST) for name in ("low", "high"))
    if low >= high:
        raise settings.wrong("low_freq_factor", f"less than high_freq_factor={high:g}")
    original = settings.values["original_max_position_embeddings"]
    return RopeSettings(
        "llama3", theta, rope_factor(settings) or 1.0, original, low_freq_factor=low, high_freq_factor=high
    )


def _yarn(theta: float, settings: JsonObject, config: Mapping[str, Any]) -> RopeSettings:
    original, factor = settings.values["original_max_position_embeddings"], rope_factor(settings)
    if factor is None:
        factor = max_positions(config) / original
    attention_factor, mscale, all_dims = (
        settings.number_or_none(name, most=_MOST) for name in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention_factor is None and mscale and all_dims:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, all_dims)
    beta_fast, beta_slow = (
        settings.number(name, default, least=1e-6, most=_MOST)
        for name, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    return RopeSettings(
        "yarn",
        theta,
        factor,
        original,
        _mscale(factor) if attention_factor is None else attention_factor,
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=settings.boolean("truncate", True),
    )


def _mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(theta: float, settings: JsonObject, config: Mapping[str, Any], rotated: int) -> RopeSettings:
    original, factor = settings.values["original_max_position_embeddings"], rope_factor(settings)
    if factor is None:
        factor = max_positions(config) / original
    attention_factor = settings.number_or_none("attention_factor", most=_MOST)
    if attention_factor is None and factor > 1.0 and original == 1:
        raise settings.wrong("original_max_position_embeddings", "more than 1 token")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_factors(settings, name, rotated) for name in ("short_factor", "long_factor"))
    return RopeSettings("longrope", theta, factor, original, attention_factor, short_factor=short, long_factor=long)


def _factors(settings: JsonObject, name: str, rotated: int) -> tuple[float, ...]:
    """Return the factor of each frequency, [rotated / 2], or () if the setting is null."""
    given = settings.values[name]
    if isinstance(given, list) and len(given) != rotated // 2:
        raise InvalidRequest(
            f"config.json: {name} has {len(given)} entries; expected {rotated // 2}, one for each pair of the {rotated}"
            " rotated elements of a head",
            field="model",
        )
    return settings.numbers(name, rotated // 2, least=1e-6, most=_MOST) or ()


# Settings without a default. The factor of yarn may be null; it then follows from the two context lengths.
_NEEDED = {
    "yarn": ("factor",),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
