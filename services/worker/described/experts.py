"""Reads a mixture of experts from ``config.json``."""

from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidRequest
from services.common.model.json_object import JsonObject
from services.worker.described.config import read_width
from services.worker.described.layer import Activation, ExpertsConfig, RouterConfig

_MOST_EXPERTS = 1 << 14  # published models have up to 512
_MOST_CHOSEN = 32  # the routing kernel chooses no more


def read_count(given: JsonObject, key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return a number of experts, groups or layers. Raises ``InvalidRequest`` if it is missing or out of range."""
    return given.integer(key, default, least=least, most=_MOST_EXPERTS)


def read_experts(
    config: Mapping[str, Any],
    router: RouterConfig,
    *,
    count: str = "num_local_experts",
    width: str,
    activation: Activation = "silu",
    expert_bias: bool = False,
    shared_width: int = 0,
) -> ExpertsConfig:
    """Return the description of the experts. ``count`` and ``width`` are the names of their keys.

    Files of transformers 5 have ``num_local_experts`` instead of other names of the count.

    Raises ``InvalidRequest`` naming the key that is missing, not supported, or of a wrong type or size.
    """
    given = JsonObject("config.json", config)
    if count not in config:
        count = "num_local_experts"
    experts = ExpertsConfig(
        count=read_count(given, count),
        chosen=given.integer("num_experts_per_tok", most=_MOST_CHOSEN),
        width=read_width(given, width),
        router=router,
        activation=activation,
        expert_bias=expert_bias,
        shared_width=shared_width,
    )
    group, uneven = divmod(experts.count, router.groups)
    if uneven or router.chosen_groups > router.groups or experts.chosen > group * router.chosen_groups:
        raise InvalidRequest(
            f"config.json: num_experts_per_tok={experts.chosen} cannot be chosen from {router.chosen_groups} of"
            f" {router.groups} groups of {count}={experts.count} experts; config.json is damaged: fetch it again",
            field="model",
        )
    return experts
