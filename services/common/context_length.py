"""The longest context that a model's ``config.json`` describes: read by the scheduler, the gateway and the worker."""

from collections.abc import Mapping
from typing import Any

# The value that transformers' config classes have for ``max_position_embeddings`` if a file leaves it out.
_DEFAULT = 2048


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the rotation: ``rope_parameters`` as transformers 5 writes them, or the older
    ``rope_scaling``. ``rope_type`` and ``original_max_position_embeddings`` are always in it.

    As in transformers, an ``original_max_position_embeddings`` beside the settings overrides the one among them, and
    ``max_position_embeddings`` stands in for both.
    """
    settings = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings["original_max_position_embeddings"] = (
        config.get("original_max_position_embeddings")
        or settings.get("original_max_position_embeddings")
        or config.get("max_position_embeddings", _DEFAULT)
    )
    return settings


def context_length(config: Mapping[str, Any]) -> int:
    """Return the longest context of a model, prompt and answer together, in tokens.

    It is ``max_position_embeddings``, which is the length before scaling in configs with ``dynamic`` scaling, and often
    in those with ``yarn``; the other kinds of scaling state the length after it.
    """
    length: int = config.get("max_position_embeddings", _DEFAULT)
    settings = rope_parameters(config)
    kind, factor = settings["rope_type"], settings.get("factor") or 1.0
    if kind == "dynamic":
        return int(length * factor)
    if kind == "yarn":
        return max(length, int(settings["original_max_position_embeddings"] * factor))
    return length
