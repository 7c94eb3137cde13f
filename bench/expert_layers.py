"""Experts of a layer for ``bench.experts``: published shapes, random inputs, and the kernels of other libraries."""

import math
from typing import NamedTuple

import torch

from services.worker.described.layer import Activation
from services.worker.described.memory import INTEGER_BITS, grouped_size
from services.worker.layers.activations import gated
from services.worker.layers.experts import ExpertWeights, Routes
from services.worker.layers.fp8 import FP8, LARGEST


class Shape(NamedTuple):
    """The experts of a published model."""

    hidden: int
    width: int
    experts: int
    chosen: int
    activation: Activation = "silu"
    biases: bool = False


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "gpt-oss-20b": Shape(2880, 2880, 32, 4, "clamped_swiglu", biases=True),
    "mixtral-8x7b": Shape(4096, 14336, 8, 2),
    "tiny": Shape(64, 64, 8, 2),
}


class Layer(NamedTuple):
    """The input of one measurement."""

    x: torch.Tensor
    routes: Routes
    weights: ExpertWeights


def torch_mix(shape: Shape, layer: Layer) -> torch.Tensor:
    """Return the mixture of ``layer``, computed with torch's grouped products. The host does not wait."""
    from services.worker.layers.triton_rows import gate, quantize

    x, routes, weights = layer
    chosen, count = routes.experts.shape[1], len(weights.down)
    experts, order = routes.experts.flatten().sort(stable=True)
    ends = torch.searchsorted(experts, torch.arange(count, device=x.device, dtype=torch.int32), right=True).int()

    def product(rows: torch.Tensor, name: str) -> torch.Tensor:
        matrices, scales, biases = (getattr(weights, name + suffix) for suffix in ("", "_scale", "_bias"))
        if scales is None:
            result = torch.nn.functional.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
        else:
            rows, scale = quantize(rows)
            result = torch.ops.aten._scaled_grouped_mm(  # noqa: SLF001 (torch has no public name for it)
                rows,
                matrices.transpose(1, 2),
                scale.flatten(),
                scales,
                offs=ends,
                out_dtype=x.dtype,
                use_fast_accum=True,
            )
        return result if biases is None else result + biases[experts]

    inner = product(x[order // chosen], "gate_up")
    fused = shape.activation != "clamped_swiglu"
    inner = gate(inner, shape.activation) if fused else gated(inner, shape.activation)
    rows = torch.empty(len(order), shape.hidden, dtype=x.dtype, device=x.device)
    rows[order] = product(inner, "down")
    return torch.einsum("tch,tc->th", rows.view(len(x), chosen, -1), routes.weights.to(x.dtype))


def flashinfer_mix(layer: Layer) -> torch.Tensor:
    """Return the mixture of ``layer``, computed by FlashInfer. Needs weights in bf16, without biases."""
    from flashinfer.fused_moe import cutlass_fused_moe

    x, (experts, scores), weights = layer
    result = cutlass_fused_moe(x, experts, scores, weights.gate_up, weights.down, x.dtype, quant_scales=[])
    return result[0] if isinstance(result, list | tuple) else result


def _random(size: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(size, generator=generator, device="cuda", dtype=torch.bfloat16)


def _grouped(size: tuple[int, int, int], form: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random codes and their scales, as in ``ExpertWeights``."""
    (experts, outputs, inputs), bits = size, INTEGER_BITS.get(form, 4)
    generator = torch.Generator("cuda").manual_seed(seed)
    packed = experts, outputs, inputs * bits // 8
    codes = torch.randint(0, 256, packed, generator=generator, device="cuda", dtype=torch.uint8)
    if form == "mxfp4":
        exponent = 126 - round(math.log2(inputs) / 2)  # of the deviation of weights, halved
        return codes, torch.full((experts, 1, inputs // 32, outputs), exponent, device="cuda", dtype=torch.uint8)
    scale = 4 / 2**bits / inputs**0.5
    return codes, torch.full((experts, 1, inputs // grouped_size(inputs), outputs), scale, device="cuda")


def make_weights(shape: Shape, form: str, seed: int) -> ExpertWeights:
    """Return random experts. ``form`` is ``bf16``, ``fp8``, ``int8``, ``int4`` or ``mxfp4``."""
    sizes = (shape.experts, 2 * shape.width, shape.hidden), (shape.experts, shape.hidden, shape.width)
    biases = [_random(size[:2], seed) for size in sizes] if shape.biases else [None, None]
    if form in (*INTEGER_BITS, "mxfp4"):
        grouped = [_grouped(size, form, seed) for size in sizes]
        return ExpertWeights(*(codes for codes, _ in grouped), *biases, 0, *(scales for _, scales in grouped))
    gate_up, down = (_random(size, seed).div_(size[2] ** 0.5) for size in sizes)
    if form == "bf16":
        return ExpertWeights(gate_up, down, *biases)
    # One scale for all rows suffices for random weights. No row exceeds six standard deviations by much.
    scales = [torch.full(size[:2], 6 / size[2] ** 0.5 / LARGEST, device="cuda") for size in sizes]
    gate_up, down = (
        (w / s[0, 0]).clamp_(-LARGEST, LARGEST).to(FP8) for w, s in zip((gate_up, down), scales, strict=True)
    )
    return ExpertWeights(gate_up, down, *biases, 0, *scales)


def make_layer(shape: Shape, tokens: int, skew: float, weights: ExpertWeights, seed: int) -> Layer:
    """Return ``tokens`` random rows with experts that are drawn with probabilities ``1 / rank ** skew``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    logits = -skew * torch.log(1 + torch.randperm(shape.experts, generator=generator, device="cuda").float())
    gumbel = -torch.empty(tokens, shape.experts, device="cuda").exponential_(generator=generator).log()
    values, experts = (logits + gumbel).topk(shape.chosen)
    routes = Routes(experts.int().contiguous(), values.softmax(dim=-1))
    return Layer(_random((tokens, shape.hidden), seed), routes, weights)
