"""Estimates of a rank's memory use, and of the KV cache that fits beside it. Sizes are in bytes.

They follow from the flags and ``config.json`` alone, so ``toka-doctor`` can compute them without torch and without
starting a worker.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.config import ChosenWorkerConfig
from services.common.plan.routed_experts import RoutedExpertsLayout
from services.worker.described.checkpoint import layer_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.forms import FP8_BLOCK, IN_DTYPE, LayerForm, WeightForm, layer_forms
from services.worker.described.naming import Shape
from services.worker.described.ranks import Ranks
from services.worker.described.shares import local_config

FLOAT32, BFLOAT16, FP8 = 4, 2, 1  # bytes per element; float16 has the size of bfloat16
INTEGER_GROUP = 32  # inputs that share a scale of integer weights
PANEL_COLUMNS = 64  # outputs in a panel, in which CPUs store weights
INTEGER_BITS = {"int8": 8, "int4": 4}
# Projections that are one matrix, with the name of the first.
_TOGETHER = {
    "q_proj": "q_proj",
    "k_proj": "q_proj",
    "v_proj": "q_proj",
    "gate_proj": "gate_proj",
    "up_proj": "gate_proj",
}
_IN_DTYPE = ("mlp.gate.", "mlp.shared_expert_gate.")  # prefixes of matrices in a layer that are no integers
_INT32, _INT64 = 4, 8
_MOST_NUMBERED_BY_A_BYTE = 256  # experts
# Left free for allocations that are not estimated: library workspaces, fragmentation, unusually large uploads.
_MARGIN = 1 << 30
_MARGIN_SHARE = 0.02
# CUDA graphs of one size, in addition to the activations of the largest size.
_GRAPH_BYTES = 64 << 20
# One piece of a piecewise graph, in addition to activations. With collectives in it, 0.8 MiB were measured on an H200.
_PIECE_BYTES = 768 << 10
# Smallest piecewise graph that gets a second variant, in which few tokens continue after the last attention.
_MIN_TRIMMED_PIECE = 256
# Estimates for one step: logits of two slices with copies of rows; the workspace of attention and copies of prefixes.
_SAMPLING_BYTES, _ATTENTION_BYTES = (1 << 30) + (128 << 20), 320 << 20
# Activations that a token holds at once, in multiples of ``hidden_size`` and of ``intermediate_size``.
_HIDDEN_COPIES, _INNER_COPIES = 4, 3


@dataclass(frozen=True)
class Footprint:
    """Estimated memory use of one rank, in bytes."""

    weights: int
    step: int  # the largest step; an estimate, which the boot replaces by a measurement
    reserved: int  # page tables and CUDA graphs
    page: int  # one page of the KV cache

    def pages_in(self, free: int, total: int, *, steps: float = 1.0) -> int:
        """Return how many pages of KV cache fit on a device with ``free`` of ``total`` bytes available.

        The result is negative if not even the other parts fit. ``steps`` scales the estimate for a step.
        """
        return int(free - self.weights - steps * self.step - self.reserved - margin(total)) // self.page


def footprint(config: ChosenWorkerConfig, model: ModelConfig, ranks: Ranks, layers: range) -> Footprint:
    """Return the memory use on CUDA of a rank that has ``layers`` of ``model``, the config of the whole model."""
    local = local_config(model, ranks, layers)
    item = FLOAT32 if config.dtype == "float32" else BFLOAT16
    cached = FP8 if config.kv_cache_dtype == "fp8" else item
    return Footprint(
        weights=weight_bytes(model, ranks, layers, item, config.quantization) + rotation_bytes(model),
        step=config.max_tokens_per_forward * _token_bytes(local, item)
        + _ATTENTION_BYTES
        + (_SAMPLING_BYTES if ranks.last else 0),
        reserved=table_bytes(config, model.max_context_tokens) + graph_bytes(config, local, item),
        page=page_bytes(local, config.page_size, cached, routed=config.return_routed_experts),
    )


def margin(total: int) -> int:
    """Return how many bytes to leave free on a device of ``total`` bytes."""
    return max(_MARGIN, int(total * _MARGIN_SHARE))


def page_bytes(local: ModelConfig, page_size: int, item: int, *, routed: bool = False) -> int:
    """Return the size of a page in all layers of a rank, with token ids. ``item`` is the size of a key's element.

    ``routed``: the page also has the experts of its tokens.
    """
    layout = routed_layout(local) if routed else None
    experts = 0 if layout is None else layout.token_bytes
    return page_size * (2 * len(local.layers) * local.kv_heads * local.head_dim * item + _INT32 + experts)


def routed_layout(model: ModelConfig) -> RoutedExpertsLayout | None:
    """Return the layout in which the experts of a token are kept, or None for a model without experts."""
    if not model.experts:
        return None
    chosen, count = (max(getattr(each, name) for each in model.experts) for name in ("chosen", "count"))
    return RoutedExpertsLayout(len(model.experts), chosen, 1 if count <= _MOST_NUMBERED_BY_A_BYTE else 2)


def table_bytes(config: ChosenWorkerConfig, max_context: int) -> int:
    """Return the size of the page tables of all slots."""
    return config.max_seqs_per_forward * -(-max_context // config.page_size) * _INT32


def _token_bytes(local: ModelConfig, item: int) -> int:
    """Return the estimated size of a token's activations.

    Each of a token's experts has a row of its own before the rows are summed.
    """
    dense = [local.intermediate_size] if local.has_dense_layers else []
    experts = [
        experts.chosen * (experts.width + local.hidden_size // _INNER_COPIES) + experts.shared_width
        for experts in local.experts
    ]
    return (_HIDDEN_COPIES * local.hidden_size + _INNER_COPIES * max(dense + experts)) * item


def graph_bytes(config: ChosenWorkerConfig, local: ModelConfig, item: int) -> int:
    """Return the size of the CUDA graphs of a rank.

    ``local`` describes the rank's share. ``item`` is the size of an activation's element.
    """
    if not config.use_cudagraphs:
        return 0
    largest = min(config.cudagraph_max_size, config.max_seqs_per_forward)
    pieces = piece_sizes(config.piecewise_tokens) if config.piecewise_tokens else []
    captured = len(pieces) + sum(kept_in_piece(size) < size for size in pieces)
    graphs = captured * (len(local.layers) + 2)  # also a graph of the whole forward pass
    piecewise = config.piecewise_tokens * _token_bytes(local, item) + graphs * _PIECE_BYTES
    return len(sizes_up_to(largest)) * _GRAPH_BYTES + piecewise


def sizes_up_to(largest: int, smallest: int = 8) -> list[int]:
    """Return the row counts for which CUDA graphs are captured, ascending.

    They are 1, 2 and 4, then multiples of 8 up to 64, of 32 up to 256, of 64 up to 1,024, and of 128. Of 1, 2 and 4,
    those below ``smallest`` are left out. The last size is the first that is at least ``largest``.
    """
    sizes = [
        *(size for size in (1, 2, 4) if size >= smallest),
        *range(8, 64, 8),
        *range(64, 256, 32),
        *range(256, 1024, 64),
        *range(1024, largest + 128, 128),
    ]
    return [size for size in sizes if size < largest] + [next(size for size in sizes if size >= largest)]


def piece_sizes(largest: int) -> list[int]:
    """Return the token counts for which piecewise CUDA graphs are captured, ascending.

    They are 16 and 32, then multiples of 64 up to 256, then eight sizes per doubling. The last is ``largest``.
    """
    sizes = [16, 32, *range(64, 256, 64)]
    while sizes[-1] < largest:
        last = sizes[-1]
        sizes.append(last + (64 if last < 256 else 1 << (last.bit_length() - 4)))
    return [size for size in sizes if size < largest] + [largest]


def kept_in_piece(size: int) -> int:
    """Return how many of ``size`` tokens may continue after the last attention in the trimmed variant of a graph."""
    return size if size < _MIN_TRIMMED_PIECE else size // 8


def rotation_bytes(model: ModelConfig) -> int:
    """Return the size of the tables of cosines and sines for all positions."""
    return 2 * len(model.ropes) * model.max_context_tokens * model.head_dim * FLOAT32


def weight_bytes(
    model: ModelConfig, ranks: Ranks, layers: range, item: int, quantization: str, device: str = "cuda"
) -> int:
    """Return the size of the parameters of a rank that has ``layers`` of ``model``.

    ``item`` is the size of an element that is not quantized. ``quantization`` is the flag, but not ``auto``.
    ``device`` is ``cpu`` or ``cuda``.
    """
    if model.parameters is not None:
        return model.parameters * item
    local = local_config(model, ranks, layers)
    kept = quantization == "checkpoint"
    forms = layer_forms(model, ranks, layers) if kept else [LayerForm()] * len(layers)
    quantization = "none" if kept else quantization
    in_dtype = _IN_DTYPE if quantization in INTEGER_BITS else ()
    total = sum(
        _tensor_bytes(shape, item, "none" if name.startswith(in_dtype) else quantization, device)
        if form.of(name) == IN_DTYPE
        else _kept_bytes(shape, item, form.of(name))
        for layer, form in zip(local.layers, forms, strict=True)
        for name, shape in _joined(layer_shapes(local, layer, adds_bias=ranks.tp_rank == 0)).items()
    )
    first, last = layers.start == 0, layers.stop == len(model.layers)
    vocabulary = (local.vocab_size, model.hidden_size)
    # A quantized head is a separate copy, even if the checkpoint ties it to the embedding.
    separate = quantization != "none" or not model.tied_embeddings
    if first or (last and not separate):
        total += _tensor_bytes(vocabulary, item)
    if last and separate:
        # The head has 8 bits with int4 too.
        total += _tensor_bytes(vocabulary, item, "int8" if quantization == "int4" else quantization, device)
    return total + (_tensor_bytes((model.hidden_size,), item) if last else 0)


def _kept_bytes(shape: Shape, item: int, form: WeightForm) -> int:
    """Return the size of a tensor of a layer in ``form``."""
    if len(shape) == 1:
        return shape[0] * item
    rows, columns = shape
    if form.kind == "mxfp4":
        return rows * columns * form.bits // 8 + rows * (columns // form.group)  # a group has an exponent of a byte
    if form.kind == "grouped":
        groups = columns // form.group if form.group else 1
        order = columns * _INT64 if form.ordered else 0
        return rows * columns * form.bits // 8 + rows * groups * FLOAT32 * (1 + form.offsets) + order
    scales = rows if form.kind == "fp8" else -(-rows // FP8_BLOCK) * -(-columns // FP8_BLOCK)
    return rows * columns * FP8 + scales * FLOAT32


def _joined(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of a layer's tensors by name, with projections of the same input as one matrix."""
    joined: dict[str, Shape] = {}
    for name, shape in shapes.items():
        *_, module, kind = name.split(".")
        if kind == "weight" and module in _TOGETHER:
            first = name.replace(module, _TOGETHER[module])
            rows = joined[first][0] if first in joined else 0
            joined[first] = (rows + shape[0], *shape[1:])
        else:
            joined[name] = shape
    return joined


def grouped_size(inputs: int) -> int:
    """Return how many inputs share a scale where integer weights are made for CUDA, if 32 divides ``inputs``."""
    return next((size for size in (128, 64) if inputs % size == 0), INTEGER_GROUP)


def _tensor_bytes(shape: tuple[int, ...], item: int, quantization: str = "none", device: str = "cuda") -> int:
    """Return the size of a tensor. An fp8 matrix also has one float32 scale per row.

    On CPUs, an integer matrix has whole panels of rows, and per row and group a float16 scale, and with 4 bits an
    offset. On CUDA it has a float32 scale for each row and group. Other matrices may have whole panels of rows on CPUs,
    too. The result leaves out these at most 63 rows of zeros.
    """
    if len(shape) == 1:
        return shape[0] * item
    rows, columns = shape
    if bits := INTEGER_BITS.get(quantization):
        if device == "cuda":
            return rows * columns * bits // 8 + rows * (columns // grouped_size(columns)) * FLOAT32
        padded = -(-rows // PANEL_COLUMNS) * PANEL_COLUMNS
        return padded * columns * bits // 8 + padded * (columns // INTEGER_GROUP) * BFLOAT16 * (8 // bits)
    return rows * columns + rows * FLOAT32 if quantization == "fp8" else rows * columns * item
