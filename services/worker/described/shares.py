"""What a tensor-parallel rank has of a model: heads, columns of the MLP, rows of the vocabulary.

As in Megatron-LM (Shoeybi et al. 2019): qkv, gate and up are split by outputs, output and down by inputs, so that a
layer's two halves need one sum over the ranks each; embedding and head are split by the vocabulary.
"""

from dataclasses import dataclass, replace

from services.common.errors import InvalidRequest
from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks

# Ranks have multiples of so many rows of the vocabulary: whole blocks of a product, in fp8 too.
_VOCABULARY_GRAIN = 16


@dataclass(frozen=True)
class Share:
    """A run of ``size`` elements from ``start`` on, out of ``whole``."""

    start: int
    size: int
    whole: int

    def times(self, width: int) -> "Share":
        """The same run where each element is ``width`` of them."""
        return Share(self.start * width, self.size * width, self.whole * width)


def evenly(whole: int, ranks: Ranks) -> Share:
    """An equal part, in the order of the ranks. ``whole`` is a multiple of ``tp_size``."""
    size = whole // ranks.tp_size
    return Share(ranks.tp_rank * size, size, whole)


def kv_heads_of(config: ModelConfig, ranks: Ranks) -> Share:
    """An equal part; where there are fewer than ranks, the one head that this rank's query heads attend with, which
    other ranks have, too."""
    if config.kv_heads >= ranks.tp_size:
        return evenly(config.kv_heads, ranks)
    return Share(ranks.tp_rank * config.kv_heads // ranks.tp_size, 1, config.kv_heads)


def vocabulary_of(config: ModelConfig, ranks: Ranks) -> tuple[Share, int]:
    """The rows of embedding and head that a rank has of the checkpoint, and how many more it has that mean nothing: all
    ranks have equally many together, which for the last may be all of them."""
    if ranks.tp_size == 1:
        return Share(0, config.vocab_size, config.vocab_size), 0
    grain = ranks.tp_size * _VOCABULARY_GRAIN
    rows = -(-config.vocab_size // grain) * _VOCABULARY_GRAIN
    start = min(ranks.tp_rank * rows, config.vocab_size)
    size = min(rows, config.vocab_size - start)
    return Share(start, size, config.vocab_size), rows - size


def local_config(config: ModelConfig, ranks: Ranks, layers: int) -> ModelConfig:
    """Return the sizes of a rank's share: ``layers`` layers, its heads and columns, and its rows of the vocabulary
    including padding. ``hidden_size``, ``head_dim`` and ``windows`` are the whole model's."""
    rows, more = vocabulary_of(config, ranks)
    return replace(
        config,
        layers=layers,
        heads=config.heads // ranks.tp_size,
        kv_heads=kv_heads_of(config, ranks).size,
        intermediate_size=config.intermediate_size // ranks.tp_size,
        vocab_size=rows.size + more,
    )


def refuse_unshareable(config: ModelConfig, tp_size: int) -> None:
    """Raises ``InvalidRequest`` for a model that so many ranks cannot share equally."""
    for name, size in (("num_attention_heads", config.heads), ("intermediate_size", config.intermediate_size)):
        if size % tp_size:
            raise InvalidRequest(
                f"flag tp_size={tp_size}: the model's {name} is {size}, which {tp_size} ranks cannot share equally;"
                f" {_instead(config)}",
                field="tp_size",
            )
    if config.kv_heads % tp_size and tp_size % config.kv_heads:
        raise InvalidRequest(
            f"flag tp_size={tp_size}: the model's num_key_value_heads is {config.kv_heads}, neither a multiple of"
            f" {tp_size} nor a divisor of it; {_instead(config)}",
            field="tp_size",
        )


def _instead(config: ModelConfig) -> str:
    sizes = [
        size
        for size in range(1, config.heads + 1)
        if not (config.heads % size or config.intermediate_size % size)
        and not (config.kv_heads % size and size % config.kv_heads)
    ]
    return f"use {', '.join(map(str, sizes[:-1]))} or {sizes[-1]}" if len(sizes) > 1 else "use 1"
