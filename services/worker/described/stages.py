"""Which layers each pipeline stage has (Huang et al. 2019, GPipe; Narayanan et al. 2021)."""

from collections.abc import Sequence
from itertools import accumulate

from services.common.errors import InvalidRequest
from services.worker.described.config import ModelConfig


def layers_of(config: ModelConfig, stages: int, counts: Sequence[int] = ()) -> list[range]:
    """The layers of each stage, by their numbers in the whole model: runs that follow one another, none of them empty.

    ``counts``: how many each has; empty = such that the slowest stage is as fast as can be. Raises ``InvalidRequest``
    for stages or counts that the model's layers do not give.
    """
    if stages > config.layers:
        raise InvalidRequest(
            f"flag pp_size={stages}: the model has {config.layers} layers, and every stage needs one; lower it",
            field="pp_size",
        )
    if counts and sum(counts) != config.layers:
        raise InvalidRequest(
            f"flag pp_layers={','.join(map(str, counts))}: {sum(counts)} layers in all, and the model has"
            f" {config.layers}; leave it out, or make them add up",
            field="pp_layers",
        )
    chosen = list(counts) or balanced(config.layers, stages, head_cost(config))
    return [range(end - count, end) for count, end in zip(chosen, accumulate(chosen), strict=True)]


def head_cost(config: ModelConfig) -> float:
    """What the vocabulary head costs, in layers: a token's time in a matrix goes with the matrix' size."""
    attention = 2 * (config.heads + config.kv_heads) * config.head_dim
    return config.vocab_size / (attention + 3 * config.intermediate_size)


def balanced(layers: int, stages: int, head: float) -> list[int]:
    """Counts by which the slowest stage is fastest. The last has the ``head``, in layers, besides; looking tokens up
    costs nothing. Among those, the counts that differ least; the first stage has the fewest of its equals, since it has
    the embedding to keep."""
    if stages == 1:
        return [layers]

    def spread(last: int) -> list[int]:
        each, more = divmod(layers - last, stages - 1)
        return [each + (stage >= stages - 1 - more) for stage in range(stages - 1)] + [last]

    def badness(counts: list[int]) -> tuple[float, float]:
        costs = [*counts[:-1], counts[-1] + head]
        return max(costs), sum(cost * cost for cost in costs)

    return min((spread(last) for last in range(1, layers - stages + 2)), key=badness)
