"""Layers, inputs and times for ``bench.quantized_products``."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch

from bench.graph_times import run_in_graph
from services.worker.layers.block_fp8 import BlockFp8Linear
from services.worker.layers.cuda_kernels import CudaKernels
from services.worker.layers.fp8 import Fp8Linear
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.linear import Linear

CACHED_BYTES = 120 << 20  # more than the L2 cache holds
DEVICE = "cuda"
_ROUNDS = 3
_RUN_S = 0.012  # of a measurement, at least
_KERNELS = CudaKernels()

# A product of the input with one layer.
Product = Callable[[Any, torch.Tensor], torch.Tensor]


class Shape(NamedTuple):
    """The sizes of a projection."""

    inputs: int
    outputs: int


# The projections of a Llama of 8B and of 1B.
SHAPES = {
    "8b qkv": Shape(4096, 6144),
    "8b output": Shape(4096, 4096),
    "8b gate_up": Shape(4096, 28672),
    "8b down": Shape(14336, 4096),
    "1b qkv": Shape(2048, 3072),
    "1b output": Shape(2048, 2048),
    "1b gate_up": Shape(2048, 16384),
    "1b down": Shape(8192, 2048),
}


class Kind(NamedTuple):
    """A kind of layer to measure."""

    make: Callable[[int, int], Any]
    product: Product
    tolerance: float  # of the relative error of a product in the Euclidean norm


def _plain(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


def _quantized(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(_KERNELS.quantize(x))


def _quantized_in_blocks(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return layer(_KERNELS.quantize(x, layer.quantizes))


def kinds(group: int) -> dict[str, Kind]:
    """Return the kinds of layers by name. ``group`` is the number of inputs that share a scale."""
    return {
        "bf16": Kind(partial(Linear, transposed=True), _plain, 0.01),
        "fp8": Kind(Fp8Linear, _quantized, 0.06),
        "int8": Kind(partial(GroupedLinear, bits=8, group=group), _plain, 0.01),
        "int4": Kind(partial(GroupedLinear, bits=4, group=group), _plain, 0.01),
        "int4 offsets": Kind(partial(GroupedLinear, bits=4, group=group, offsets=True), _plain, 0.01),
        "block fp8": Kind(BlockFp8Linear, _quantized_in_blocks, 0.06),
    }


def make_layers(kind: Kind, shape: Shape, *, copies: int | None = None) -> tuple[list[Any], torch.Tensor]:
    """Return equal layers that together exceed the L2 cache, and their weight as float32 ``[outputs, inputs]``."""
    with torch.device(DEVICE):
        layer = kind.make(shape.inputs, shape.outputs)
        layer = layer.bfloat16() if isinstance(layer, Linear) else layer
        target = layer.targets("a")["a.weight"]
        target.copy_(torch.randn(shape.outputs, shape.inputs) / shape.inputs**0.5)
        if isinstance(layer, GroupedLinear) and layer.offsets is not None:
            layer.offsets.copy_(torch.randn(layer.offsets.shape) / shape.inputs)
        weight = torch.empty(shape.outputs, shape.inputs)
        weight.copy_(target) if isinstance(target, torch.Tensor) else target.copy_to(weight)
    size = sum(each.nbytes for each in [*layer.parameters(), *layer.buffers()])
    count = copies or max(2, -(-CACHED_BYTES // size))
    return [layer, *(deepcopy(layer) for _ in range(count - 1))], weight


def relative_error(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the error of ``found`` against ``x @ weight.T`` in float32, relative in the Euclidean norm."""
    expected = x.float() @ weight.t()
    return float((found.float() - expected).norm() / expected.norm())


def microseconds(product: Product, layers: Sequence[Any], x: torch.Tensor) -> float:
    """Return the time of a product of ``x`` in a CUDA graph of products with all ``layers``."""
    return 1000 * run_in_graph(lambda layer: product(layer, x), layers, rounds=_ROUNDS, seconds=_RUN_S)
