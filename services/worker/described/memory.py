"""What a rank keeps on its device, and what is left for the KV cache: from flags and ``config.json`` alone, so that it
can be asked before a start, and where there is no torch. Sizes are bytes."""

from dataclasses import dataclass

from services.common.config import ChosenWorkerConfig
from services.worker.described.checkpoint import layer_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config

FLOAT32, BFLOAT16, FP8 = 4, 2, 1  # of an element; float16 takes as much as bfloat16
_INT32 = 4
# Kept free for what cannot be measured beforehand: libraries' workspaces, fragments, uploads of unusual size.
_MARGIN = 1 << 30
_MARGIN_SHARE = 0.02
# What the graphs of one size take beside the activations of the largest.
_OF_GRAPH = 64 << 20
# And what a graph between two attentions takes, beside activations: with collectives in it, 0.8 MiB on an H200.
_OF_PIECE = 768 << 10
# From so many tokens on it is worth having graphs in which few go on behind the last attention.
_FEWEST_KEPT_APART = 256
# Of a step, in a guess: logits of two slices, copies of rows, and the workspace of attention.
_OF_SAMPLING, _OF_ATTENTION = (1 << 30) + (128 << 20), 256 << 20
# Widths of the residual stream, and of the MLP, that a token has at once.
_STREAMS, _INNER = 4, 3


@dataclass(frozen=True)
class Footprint:
    """Of one rank."""

    weights: int
    step: int  # the largest one, in a guess: the boot measures it
    reserved: int  # page tables, CUDA graphs
    page: int

    def pages_in(self, free: int, total: int, *, steps: float = 1.0) -> int:
        """Pages of cache that fit into ``free`` of ``total``; negative: not even the rest does. ``steps``: what the
        guess is taken times."""
        return int(free - self.weights - steps * self.step - self.reserved - margin(total)) // self.page


def footprint(
    config: ChosenWorkerConfig, model: ModelConfig, ranks: Ranks, layers: range, max_context: int
) -> Footprint:
    """On CUDA, of a rank with ``layers`` of ``model``, the whole model's config."""
    local = local_config(model, ranks, len(layers))
    item = FLOAT32 if config.dtype == "float32" else BFLOAT16
    cached = FP8 if config.kv_cache_dtype == "fp8" else item
    return Footprint(
        weights=weight_bytes(model, ranks, layers, item, config.quantization) + rotation_bytes(model),
        step=config.max_tokens_per_forward * _token_bytes(local, item)
        + _OF_ATTENTION
        + (_OF_SAMPLING if ranks.last else 0),
        reserved=table_bytes(config, max_context) + graph_bytes(config, local, item),
        page=page_bytes(local, config.page_size, cached),
    )


def margin(total: int) -> int:
    """Kept free on a device of ``total`` bytes."""
    return max(_MARGIN, int(total * _MARGIN_SHARE))


def page_bytes(local: ModelConfig, page_size: int, item: int) -> int:
    """What a page takes in all layers of a rank, token ids included. ``item``: of a key's element."""
    return page_size * (2 * local.layers * local.kv_heads * local.head_dim * item + _INT32)


def table_bytes(config: ChosenWorkerConfig, max_context: int) -> int:
    """The page tables of all slots."""
    return config.max_seqs_per_forward * -(-max_context // config.page_size) * _INT32


def _token_bytes(local: ModelConfig, item: int) -> int:
    """A token's activations in a step, in a guess."""
    return (_STREAMS * local.hidden_size + _INNER * local.intermediate_size) * item


def graph_bytes(config: ChosenWorkerConfig, local: ModelConfig, item: int) -> int:
    """CUDA graphs. ``local``: what a rank has; ``item``: of an activation's element."""
    if not config.use_cudagraphs:
        return 0
    largest = min(config.cudagraph_max_size, config.max_seqs_per_forward)
    pieces = piece_sizes(config.piecewise_tokens) if config.piecewise_tokens else []
    captured = len(pieces) + sum(kept_in_piece(size) < size for size in pieces)
    of_pieces = config.piecewise_tokens * _token_bytes(local, item) + captured * (local.layers + 1) * _OF_PIECE
    return len(sizes_up_to(largest)) * _OF_GRAPH + of_pieces


def sizes_up_to(largest: int, smallest: int = 8) -> list[int]:
    """Rows of the steps that are CUDA graphs: 1, 2, 4, to 64 in steps of 8, to 256 in steps of 32, to 1,024 in steps of
    64, then of 128; ascending from ``smallest`` on, the last one at least ``largest``."""
    sizes = [
        *(size for size in (1, 2, 4) if size >= smallest),
        *range(8, 64, 8),
        *range(64, 256, 32),
        *range(256, 1024, 64),
        *range(1024, largest + 128, 128),
    ]
    return [size for size in sizes if size < largest] + [next(size for size in sizes if size >= largest)]


def piece_sizes(largest: int) -> list[int]:
    """Tokens of the steps that are CUDA graphs between their attentions: 16, 32, to 256 in steps of 64, then eight for
    each doubling; ascending, the last is ``largest``."""
    sizes = [16, 32, *range(64, 256, 64)]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last + (64 if last < 256 else 1 << (last.bit_length() - 4)))
    return [size for size in sizes if size < largest] + [largest]


def kept_in_piece(size: int) -> int:
    """How many of ``size`` tokens go on behind the last attention at most where not all do."""
    return size if size < _FEWEST_KEPT_APART else size // 8


def rotation_bytes(model: ModelConfig) -> int:
    """Cosines and sines of all positions."""
    return 2 * model.max_context_tokens * model.head_dim * FLOAT32


def weight_bytes(model: ModelConfig, ranks: Ranks, layers: range, item: int, quantization: str) -> int:
    """The parameters of a rank with ``layers`` of ``model``."""
    local = local_config(model, ranks, len(layers))
    total = 0
    for shape in layer_shapes(local, adds_bias=ranks.tp_rank == 0).values():
        total += len(layers) * _tensor_bytes(shape, item, quantization)
    first, last = layers.start == 0, layers.stop == model.layers
    vocabulary = (local.vocab_size, model.hidden_size)
    # A quantised head is a copy of the embedding even where the two are one.
    separate = quantization == "fp8" or not model.tied_embeddings
    if first or (last and not separate):
        total += _tensor_bytes(vocabulary, item)
    if last and separate:
        total += _tensor_bytes(vocabulary, item, quantization)
    return total + (_tensor_bytes((model.hidden_size,), item) if last else 0)


def _tensor_bytes(shape: tuple[int, ...], item: int, quantization: str = "none") -> int:
    """In fp8 a matrix has a float32 for each of its rows."""
    if len(shape) == 1:
        return shape[0] * item
    rows, columns = shape
    return rows * columns + rows * FLOAT32 if quantization == "fp8" else rows * columns * item
