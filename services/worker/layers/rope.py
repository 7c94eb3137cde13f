"""How positions are rotated, as ``config.json`` says it. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidRequest


@dataclass(frozen=True)
class RopeSettings:
    """``kind`` is the ``rope_type`` of the config; the fields after ``factor`` belong to ``llama3``."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Raises ``InvalidRequest`` for a kind that is not supported or lacks a setting.
    """
    settings = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = settings.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise InvalidRequest(
            f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are", field="model"
        )
    partial = settings.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise InvalidRequest(f"config.json: partial_rotary_factor={partial} is not supported; only 1 is", field="model")
    if head_dim % 2:
        raise InvalidRequest(f"config.json: head_dim={head_dim} is odd, so it cannot be rotated", field="model")
    if kind == "default":
        return RopeSettings("default", theta)
    try:
        if kind == "linear":
            return RopeSettings("linear", theta, settings["factor"])
        return RopeSettings(
            "llama3",
            theta,
            settings["factor"],
            settings["low_freq_factor"],
            settings["high_freq_factor"],
            settings["original_max_position_embeddings"],
        )
    except KeyError as error:
        raise InvalidRequest(
            f"config.json: rope type {kind!r} needs {error.args[0]}, which is missing", field="model"
        ) from error
