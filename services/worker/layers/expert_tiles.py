"""Tile sizes of the products of ``triton_experts``, by the number of pairs per expert.

``python -m bench.experts mode=tune`` measures them on a device and prints rows for the tables.
"""

from typing import NamedTuple

from services.worker.layers.block_fp8 import BLOCK

# Products of at most this number of pairs read the weights for each pair, without sorting the pairs by expert.
MOST_STREAMED_PAIRS = 16
# Up to these numbers, pairs are counted and sorted in one iteration of one kernel, by 4 or by 8 warps.
FEW_PAIRS, MANY_PAIRS = 512, 4096


class Tile(NamedTuple):
    """The tile sizes and launch options of one product. Sizes are powers of two."""

    outputs: int  # rows of an expert's matrix per program; with the gate, a program has half this number of results
    inputs: int  # inputs per iteration; not used for ``GroupedWeights``, of which an iteration multiplies a tile
    warps: int
    stages: int  # pipeline stages, Triton's ``num_stages``


class ExpertTiles(NamedTuple):
    """The options of both products."""

    rows: int  # pairs per block; below 64, the matrix is the first factor of the product
    group: int  # blocks that follow each other in a group, so that their matrices stay in the L2 cache
    gate_up: Tile
    down: Tile


_MOST = 1 << 62  # exceeds any number of pairs
# Options by the bytes of a weight, 2 (16 bits) or 1 (fp8), and then by the largest mean number of pairs per expert.
# They are the fastest of those tried on an H200 with the shape of Qwen3-30B-A3B.
_TABLES: dict[int, dict[int, ExpertTiles]] = {
    2: {
        8: ExpertTiles(16, 1, Tile(128, 128, 8, 5), Tile(128, 128, 8, 3)),
        24: ExpertTiles(32, 1, Tile(128, 64, 4, 4), Tile(128, 64, 4, 4)),
        96: ExpertTiles(64, 8, Tile(256, 64, 4, 4), Tile(256, 64, 4, 4)),
        512: ExpertTiles(128, 1, Tile(256, 64, 8, 4), Tile(256, 64, 8, 4)),
        _MOST: ExpertTiles(128, 8, Tile(256, 64, 8, 3), Tile(256, 64, 8, 3)),
    },
    1: {
        8: ExpertTiles(16, 1, Tile(128, 256, 8, 3), Tile(128, 256, 8, 3)),
        24: ExpertTiles(32, 1, Tile(128, 128, 4, 3), Tile(128, 128, 4, 3)),
        96: ExpertTiles(64, 8, Tile(256, 128, 4, 4), Tile(256, 128, 4, 4)),
        512: ExpertTiles(128, 1, Tile(256, 128, 8, 4), Tile(256, 128, 8, 4)),
        _MOST: ExpertTiles(128, 16, Tile(256, 128, 8, 3), Tile(256, 128, 8, 4)),
    },
    # float32 has no tensor cores here.
    4: {_MOST: ExpertTiles(16, 1, Tile(64, 32, 4, 2), Tile(64, 32, 4, 2))},
}


def _in_blocks(tile: Tile) -> Tile:
    """Return ``tile``, reduced so that the inputs of an iteration have one scale, and two sums fit into registers."""
    return tile._replace(outputs=min(tile.outputs, BLOCK), inputs=min(tile.inputs, BLOCK))


# Options for bytes with scales of blocks. Other tiles are up to 10 % faster.
_IN_BLOCKS = {
    most: tiles._replace(gate_up=_in_blocks(tiles.gate_up), down=_in_blocks(tiles.down))
    for most, tiles in _TABLES[1].items()
}
# The same with scales of groups. The first are the fastest of 18 for the shapes of Qwen3-30B-A3B and gpt-oss-20b.
_IN_GROUPS = _IN_BLOCKS | {8: ExpertTiles(16, 1, Tile(32, 128, 2, 3), Tile(32, 128, 2, 3))}

# Rows of a block of ``gluon_experts``, by the largest mean number of pairs per expert. None: tiles are faster. They
# were measured on an H200 with the shapes of Qwen3-30B-A3B and gpt-oss-20b.
_WIDE_ROWS = {16: None, 48: 64, 160: 128, _MOST: 256}


def choose_wide_rows(pairs: int, experts: int) -> int | None:
    """Return the rows of a block of ``gluon_experts`` for ``pairs`` of ``experts``, or None where tiles are faster."""
    return next(rows for most, rows in _WIDE_ROWS.items() if pairs <= most * experts)


def choose_tiles(pairs: int, experts: int, item: int, *, blocks: bool = False, groups: bool = False) -> ExpertTiles:
    """Return the options for ``pairs`` of ``experts``, with weights of ``item`` bytes.

    ``blocks`` and ``groups`` are true for weights that have scales of blocks or of groups.
    """
    table = _IN_GROUPS if groups else _IN_BLOCKS if blocks else _TABLES[item]
    return next(tiles for most, tiles in table.items() if pairs <= most * experts)


def changes(experts: int, chosen: int, item: int, *, groups: bool = False) -> list[int]:
    """Return the numbers of tokens from which on other kernels run, ascending.

    The boot runs steps on both sides of each, so that no kernel is compiled while requests are served.
    """
    means = {*_TABLES[item], *(_WIDE_ROWS if groups else ())} - {_MOST}
    limits = {MOST_STREAMED_PAIRS, FEW_PAIRS, MANY_PAIRS, *(mean * experts for mean in means)}
    return sorted({most // chosen + 1 for most in limits})
