"""The share of a model that a tensor-parallel rank holds: heads, columns of the MLP, rows of the vocabulary.

The split is that of Megatron-LM (Shoeybi et al. 2019). The qkv, gate and up projections are split by outputs, and the
output and down projections by inputs, so attention and MLP each need one sum over the ranks. Embedding and head are
split by the vocabulary.

Experts are split like an MLP, each by its columns. With expert parallelism, a rank has whole experts instead.
"""

from dataclasses import dataclass, replace

from services.common.errors import InvalidRequest
from services.worker.described.config import ModelConfig
from services.worker.described.layer import ExpertsConfig, LayerConfig
from services.worker.described.ranks import Ranks

# The vocabulary rows of a rank are a multiple of this number, as matrix products in fp8 require.
_VOCABULARY_GRAIN = 16


@dataclass(frozen=True)
class RankShare:
    """A contiguous range of ``size`` elements that begins at ``start``, out of ``whole`` elements."""

    start: int
    size: int
    whole: int

    def times(self, width: int) -> "RankShare":
        """Return the same range in units that are ``width`` times smaller."""
        return RankShare(self.start * width, self.size * width, self.whole * width)


def evenly(whole: int, ranks: Ranks) -> RankShare:
    """Return the share of a rank if ``whole``, a multiple of ``tp_size``, is split equally."""
    size = whole // ranks.tp_size
    return RankShare(ranks.tp_rank * size, size, whole)


def kv_heads_of(config: ModelConfig, ranks: Ranks) -> RankShare:
    """Return the key-value heads of a rank.

    If there are fewer heads than ranks, several ranks hold a copy of the same head.
    """
    if config.kv_heads >= ranks.tp_size:
        return evenly(config.kv_heads, ranks)
    return RankShare(ranks.tp_rank * config.kv_heads // ranks.tp_size, 1, config.kv_heads)


def vocabulary_of(config: ModelConfig, ranks: Ranks) -> tuple[RankShare, int]:
    """Return the rows of embedding and head that a rank holds, and the number of padding rows after them.

    The sum of both is the same on all ranks. The last ranks may have padding rows only.
    """
    if ranks.tp_size == 1:
        return RankShare(0, config.vocab_size, config.vocab_size), 0
    grain = ranks.tp_size * _VOCABULARY_GRAIN
    rows = -(-config.vocab_size // grain) * _VOCABULARY_GRAIN
    start = min(ranks.tp_rank * rows, config.vocab_size)
    size = min(rows, config.vocab_size - start)
    return RankShare(start, size, config.vocab_size), rows - size


def local_config(config: ModelConfig, ranks: Ranks, layers: range) -> ModelConfig:
    """Return the config of a rank's share, which has ``layers`` of the model. ``vocab_size`` includes padding rows.

    ``hidden_size`` and ``head_dim`` remain those of the whole model.
    """
    rows, padding = vocabulary_of(config, ranks)
    return replace(
        config,
        layers=tuple(_local_layer(layer, ranks) for layer in config.layers[layers.start : layers.stop]),
        heads=config.heads // ranks.tp_size,
        kv_heads=kv_heads_of(config, ranks).size,
        intermediate_size=config.intermediate_size // ranks.tp_size,
        vocab_size=rows.size + padding,
    )


def _local_layer(layer: LayerConfig, ranks: Ranks) -> LayerConfig:
    """Return ``layer`` with a rank's share of its experts."""
    experts = layer.mlp
    if not isinstance(experts, ExpertsConfig) or ranks.tp_size == 1:
        return layer
    shared = experts.shared_width // ranks.tp_size
    if ranks.whole_experts:
        share = evenly(experts.count, ranks)
        held = range(share.start, share.start + share.size)
        return replace(layer, mlp=replace(experts, shared_width=shared, held=held))
    return replace(layer, mlp=replace(experts, shared_width=shared, width=experts.width // ranks.tp_size))


def refuse_unshareable(config: ModelConfig, tp_size: int, *, expert_parallel: bool = False) -> None:
    """Raise ``InvalidRequest`` if the model cannot be split equally among ``tp_size`` ranks.

    With ``expert_parallel``, ranks have whole experts, so a model without experts is refused.
    """
    if expert_parallel and not config.experts:
        raise InvalidRequest(
            "flag expert_parallel=T: the model has no experts, only dense layers; leave the flag out",
            field="expert_parallel",
        )
    sizes = _shared_sizes(config, expert_parallel)
    for name, size in sizes.items():
        if size % tp_size:
            raise InvalidRequest(
                f"flag tp_size={tp_size}: the model's {name} is {size}, which {tp_size} ranks cannot share equally;"
                f" {_instead(config, sizes)}",
                field="tp_size",
            )
    if config.kv_heads % tp_size and tp_size % config.kv_heads:
        raise InvalidRequest(
            f"flag tp_size={tp_size}: the model's num_key_value_heads is {config.kv_heads}, neither a multiple of"
            f" {tp_size} nor a divisor of it; {_instead(config, sizes)}",
            field="tp_size",
        )


def _shared_sizes(config: ModelConfig, expert_parallel: bool) -> dict[str, int]:
    """Return the sizes that the ranks share equally, by their names for messages."""
    sizes = {"num_attention_heads": config.heads}
    if config.has_dense_layers:
        sizes["intermediate_size"] = config.intermediate_size
    for experts in config.experts:
        if expert_parallel:
            sizes["number of experts"] = experts.count
        else:
            sizes["width of an expert"] = experts.width
        if experts.shared_width:
            sizes["width of the shared expert"] = experts.shared_width
    return sizes


def _instead(config: ModelConfig, shared: dict[str, int]) -> str:
    sizes = [
        size
        for size in range(1, config.heads + 1)
        if not any(each % size for each in shared.values()) and not (config.kv_heads % size and size % config.kv_heads)
    ]
    return f"use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else "use 1"
