"""The layers of each pipeline stage (Huang et al. 2019, GPipe; Narayanan et al. 2021)."""

from collections.abc import Sequence
from itertools import accumulate

from services.common.errors import InvalidRequest
from services.worker.described.checkpoint import active_parameters
from services.worker.described.config import ModelConfig


def layers_of(config: ModelConfig, stages: int, counts: Sequence[int] = ()) -> list[range]:
    """Return the layers of each stage as consecutive ranges, none of them empty.

    ``counts`` gives the number of layers per stage. If it is empty, the counts are balanced. Raises ``InvalidRequest``
    if there are more stages than layers, or if the counts do not add up to the model's layers.
    """
    if stages > len(config.layers):
        raise InvalidRequest(
            f"flag pp_size={stages}: the model has {len(config.layers)} layers, and every stage needs one; lower it",
            field="pp_size",
        )
    if counts and sum(counts) != len(config.layers):
        raise InvalidRequest(
            f"flag pp_layers={','.join(map(str, counts))}: {sum(counts)} layers in all, and the model has"
            f" {len(config.layers)}; leave it out, or make them add up",
            field="pp_layers",
        )
    chosen = list(counts) or balanced(len(config.layers), stages, head_cost(config))
    return [range(end - count, end) for count, end in zip(chosen, accumulate(chosen), strict=True)]


def head_cost(config: ModelConfig) -> float:
    """Return the cost of the vocabulary head in units of a mean layer, by the parameters that compute a token."""
    layers = sum(active_parameters(config, layer) for layer in config.layers) / len(config.layers)
    return config.vocab_size * config.hidden_size / layers


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """Return the layer counts that minimise the cost of the slowest stage.

    ``head`` is the additional cost of the last stage, in layers. Embedding tokens costs nothing. Among equal results,
    the counts that differ least are taken. Earlier stages then have fewer layers, because the first also stores the
    embedding.
    """
    if stages == 1:
        return [layers]

    def spread(last: int) -> list[int]:
        each, remainder = divmod(layers - last, stages - 1)
        return [each + (stage >= stages - 1 - remainder) for stage in range(stages - 1)] + [last]

    def cost(counts: list[int]) -> tuple[float, float]:
        costs = [*counts[:-1], counts[-1] + head]
        return max(costs), sum(cost * cost for cost in costs)

    return min((spread(last) for last in range(1, layers - stages + 2)), key=cost)
