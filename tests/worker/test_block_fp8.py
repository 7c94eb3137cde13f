"""Linear layers in fp8 with scales of blocks, and their products on CUDA."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from services.worker.described.layer import ExpertsConfig
from services.worker.layers.block_fp8 import (
    BLOCK,
    BlockFp8Linear,
    block_product,
    blocks_of,
    expand_blocks,
    quantize_blocks,
)
from services.worker.layers.fp8 import FP8, Fp8Linear, Quantized, quantize_rows
from services.worker.layers.linear import Linear
from services.worker.models.decoder import DecoderModel
from services.worker.models.experts import Experts
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.small_models import PlainRotatingStep, one_sequence, small_config, small_model
from tests.worker.test_grouped import quantized

kernels = pytest.mark.usefixtures("triton_ready")
# Products of values in fp8 are exact, and sums are in float32.
TOLERANCE = 1e-5


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def uneven(outputs: int, inputs: int, seed: int = 0) -> torch.Tensor:
    """A weight whose blocks have different magnitudes."""
    exponents = torch.randint(
        -6, 6, (blocks_of(outputs), blocks_of(inputs)), generator=torch.Generator().manual_seed(seed)
    )
    return random(outputs, inputs, seed=seed) * expand_blocks(torch.exp2(exponents.float()), outputs, inputs)


def dequantized(x: Quantized) -> torch.Tensor:
    return x.rows.float() * x.scale.repeat_interleave(BLOCK, dim=1)[:, : x.rows.shape[1]]


def near(found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    expected = expected.float()
    torch.testing.assert_close(
        found.float().cpu(), expected.cpu(), rtol=tolerance, atol=tolerance * float(expected.abs().max())
    )


@pytest.mark.parametrize(("outputs", "inputs"), [(128, 128), (256, 384), (200, 320), (16, 48)])
def test_a_weight_is_quantized_by_blocks(outputs, inputs):
    weight = uneven(outputs, inputs)
    values, scale = quantize_blocks(weight)
    assert (values.shape, values.dtype) == (weight.shape, FP8)
    assert scale.shape == (blocks_of(outputs), blocks_of(inputs))
    errors = (values.float() * expand_blocks(scale, outputs, inputs) - weight).abs()
    # Values of fp8 have 3 bits after the first; the smallest are multiples of 2**-9 of a scale.
    assert bool((errors <= weight.abs() / 16 + expand_blocks(scale, outputs, inputs) * 2**-10).all())


@pytest.mark.parametrize("size", [128, 256, 320, 100])
def test_rows_are_quantized_by_blocks_of_columns(size):
    x = random(5, size) * torch.exp2(torch.arange(size) // BLOCK * 4.0)
    rows, scale = quantize_rows(x, BLOCK)
    assert rows.shape == x.shape
    assert scale.shape == (5, blocks_of(size))
    assert scale.stride(0) == 1
    for block, part in enumerate(x.split(BLOCK, dim=1)):
        expected = quantize_rows(part)
        assert torch.equal(rows.split(BLOCK, dim=1)[block].float(), expected.rows.float())
        assert torch.equal(scale[:, block : block + 1], expected.scale)


@pytest.mark.parametrize("outputs", [(256,), (128, 128, 48)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_the_product_of_its_values(outputs, bias):
    inputs, width = 320, sum(outputs)
    layer = BlockFp8Linear(inputs, outputs, bias, dtype=torch.float32)
    weight, offset = uneven(width, inputs), random(width, seed=1)
    names = [f"part{index}" for index in range(len(outputs))]
    targets = layer.targets(*names)
    for name, part, values in zip(names, weight.split(outputs), offset.split(outputs), strict=True):
        targets[f"{name}.weight"].copy_(part.double())
        if bias:
            targets[f"{name}.bias"].copy_(values)
    x = quantize_rows(random(3, inputs, seed=2), BLOCK)
    expected = F.linear(dequantized(x), layer.weight.float() * expand_blocks(layer.scale, width, inputs))
    expected = expected + offset if bias else expected
    near(layer(x), expected)
    total = random(3, width, seed=3)
    near(layer(x, total.clone()), expected + total)


def test_weights_of_a_checkpoint_are_stored_unchanged():
    layer = BlockFp8Linear(256, (128, 72))
    parts = {"a": quantize_blocks(uneven(128, 256)), "b": quantize_blocks(uneven(72, 256, seed=1))}
    targets = layer.targets(*parts)
    for name, (codes, scales) in parts.items():
        target = targets[f"{name}.weight"]
        target.copy_quantized(quantized(codes, scales))
        rows = torch.empty(50, 256)
        target.copy_to(rows)
        assert torch.equal(rows, (codes.float() * expand_blocks(scales, *codes.shape))[:50])
    assert torch.equal(layer.weight.float(), torch.cat([codes.float() for codes, _ in parts.values()]))
    assert torch.equal(layer.scale, torch.cat([scales for _, scales in parts.values()]))


@pytest.mark.parametrize(
    ("codes", "scales"),
    [
        (torch.zeros(128, 256), torch.zeros(1, 2)),
        (torch.zeros(128, 128, dtype=FP8), torch.zeros(1, 1)),
        (torch.zeros(128, 256, dtype=FP8), torch.zeros(128, 1)),
    ],
)
def test_weights_of_another_form_are_refused(codes, scales):
    target = BlockFp8Linear(256, 128).targets("a")["a.weight"]
    with pytest.raises(ValueError, match=r"expected \[128, 256\] .* with scales \[1, 2\]; dequantize the weight first"):
        target.copy_quantized(quantized(codes, scales))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (256, (64, 128), "parts of 64, 128 rows: with scales of 128 x 128 blocks"),
        (100, 128, "a weight with 100 inputs: products in fp8 need a multiple of 16"),
    ],
)
def test_unsupported_sizes_are_refused(inputs, outputs, message):
    with pytest.raises(ValueError, match=message):
        BlockFp8Linear(inputs, outputs)


@pytest.mark.parametrize("scales", [torch.tensor([[0.5]]), torch.rand(64, 1)])
def test_scales_of_tensors_and_rows_are_stored_for_each_row(scales):
    layer = Fp8Linear(96, (64, 32))
    codes, _ = quantize_rows(random(64, 96))
    target = layer.targets("a", "b")["a.weight"]
    target.copy_quantized(quantized(codes, scales))
    rows = torch.empty(64, 96)
    target.copy_to(rows)
    assert torch.equal(rows, codes.float() * scales)
    with pytest.raises(ValueError, match=r"expected .* with a scale per tensor or per row"):
        target.copy_quantized(quantized(codes, torch.ones(1, 2)))


@needs_triton
@kernels
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (200, 320)])
@pytest.mark.parametrize("rows", [1, 5, 20, 65])
def test_products_have_the_scales_of_blocks(rows, outputs, inputs):
    from services.worker.layers.triton_block_fp8 import block_fp8_product

    x = quantize_rows(random(rows, inputs), BLOCK)
    weight, scale = quantize_blocks(uneven(outputs, inputs, seed=1))
    expected = block_product(x, weight, scale, torch.float32)
    there = [each.to(DEVICE) for each in (*x, weight, scale)]
    # A GPU sums 128 products with fewer bits than float32 has.
    near(block_fp8_product(*there, torch.float32), expected, TOLERANCE if INTERPRETED else 2e-3)


@needs_triton
@kernels
@pytest.mark.parametrize(("rows", "outputs"), [(16, 32), (16, 128), (64, 32), (64, 128), (128, 128)])
def test_tiles_of_all_sizes_give_the_same(rows, outputs):
    from services.worker.layers.triton_block_fp8 import BlockTile, product_with_tile

    x = quantize_rows(random(150, 256), BLOCK)
    weight, scale = quantize_blocks(uneven(264, 256, seed=1))
    there = [each.to(DEVICE) for each in (*x, weight, scale)]
    found = product_with_tile(*there, torch.float32, BlockTile(rows, outputs, 4, 3, group=2))
    near(found, block_product(x, weight, scale, torch.float32), TOLERANCE if INTERPRETED else 2e-3)


@needs_triton
@pytest.mark.parametrize("outputs", [64, 4096, 28672])
def test_a_start_runs_each_kernel_of_a_product(outputs):
    from services.worker.layers.triton_block_fp8 import choose_tile, row_changes

    changes = row_changes(outputs)
    assert {17, 33, 257} <= set(changes)
    begun = {choose_tile(rows, outputs) for rows in (1, *changes)}
    assert begun == {choose_tile(rows, outputs) for rows in range(1, 5000)}


@pytest.mark.skipif(INTERPRETED, reason="cuBLAS needs a GPU")
@pytest.mark.parametrize("rows", [64, 67, 1024])
def test_cublas_gives_what_the_kernel_gives(rows):
    from services.worker.layers.triton_block_fp8 import cublas_product

    x = quantize_rows(random(rows, 1024), BLOCK)
    weight, scale = quantize_blocks(uneven(640, 1024, seed=1))
    there = [each.to(DEVICE) for each in (*x, weight, scale)]
    near(cublas_product(*there, torch.bfloat16), block_product(x, weight, scale, torch.float32), 2**-7)


@needs_triton
@pytest.mark.parametrize(("sizes", "supported"), [((64, 1024), True), ((72, 1024), False), ((64, 1152), False)])
def test_cublas_takes_aligned_sizes(sizes, supported):
    from services.worker.layers.triton_block_fp8 import cublas_supports

    assert cublas_supports(*sizes) is supported


@needs_triton
@kernels
@pytest.mark.parametrize(("outputs", "inputs"), [(256, 512), (200, 320), (128, 100)])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_few_rows_in_16_bits_are_multiplied_by_blocks(rows, outputs, inputs, gated):
    from services.worker.layers.triton_skinny import LinearWeights, skinny_product

    if gated and outputs % (2 * BLOCK):
        outputs = 2 * BLOCK
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x, norm = random(rows, inputs).to(dtype), (1 + random(inputs, seed=2) / 4).to(dtype)
    weight, scale = quantize_blocks(uneven(outputs, inputs, seed=1) / 64)
    expected = F.linear(
        F.rms_norm(x.float(), (inputs,), norm.float(), 1e-5), weight.float() * expand_blocks(scale, outputs, inputs)
    )
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = F.silu(gate) * up
    linear = LinearWeights(weight.to(DEVICE), None, scale.to(DEVICE))
    found = skinny_product(x.to(DEVICE), linear, norm=(norm.to(DEVICE), 1e-5), gated=gated)
    near(found, expected, 2**-8 if INTERPRETED else 2**-6)


@needs_triton
@kernels
@pytest.mark.parametrize("size", [256, 320, 96])
def test_operators_between_products_quantize_by_blocks(size):
    from services.worker.layers.triton_rows import gate_quantized, norm_quantized, quantize

    x, gate_up = random(4, size).to(DEVICE), random(4, 2 * size, seed=1).to(DEVICE)
    delta, norm = random(4, size, seed=2).to(DEVICE), 1 + random(size, seed=3).to(DEVICE) / 4
    gate, up = gate_up.chunk(2, dim=1)
    for found, values in (
        (quantize(x, BLOCK), x),
        (gate_quantized(gate_up, "silu", BLOCK), F.silu(gate) * up),
        (norm_quantized(x.clone(), delta, norm, 1e-5, BLOCK), F.rms_norm(x + delta, (size,), norm, 1e-5)),
    ):
        quantized, expected = Quantized(*found), quantize_rows(values, BLOCK)
        assert quantized.scale.shape == expected.scale.shape
        assert quantized.scale.stride(0) == 1
        near(quantized.scale, expected.scale, 1e-4)
        # The interpreter does not round all values as the hardware does.
        same = (dequantized(quantized) - dequantized(expected)).abs() < 1e-6
        assert same.float().mean() > (0.9 if INTERPRETED else 0.99)


# Each part of a projection is a multiple of 128 rows.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "heads": 4, "kv_heads": 4, "head_dim": 32}
EXPERTS = ExpertsConfig(count=4, chosen=2, width=128)


def models(dtype: torch.dtype, **changes) -> tuple[DecoderModel, DecoderModel]:
    """Return a model with scales of blocks, and one with the same weights in ``dtype``."""
    config = small_config(layers=2, **SIZES | changes)
    model = small_model(config, dtype, linear=partial(BlockFp8Linear, dtype=dtype))
    same = small_model(config, dtype, linear=partial(Linear, transposed=True))
    with torch.inference_mode():
        for name, module in same.named_modules():
            other = model.get_submodule(name)
            if isinstance(module, Linear):
                module.weight.copy_(other.weight.float() * expand_blocks(other.scale, *other.weight.shape))
            elif isinstance(module, Experts):
                for matrix in ("gate_up", "down_matrix"):
                    scales = getattr(other, f"{matrix}_scale")
                    for index, weight in enumerate(getattr(other, matrix)):
                        scale = expand_blocks(scales[index], *weight.shape)
                        getattr(module, matrix)[index].copy_(weight.float() * scale)
    return model, same


@pytest.mark.parametrize("changes", [{}, {"mlp": EXPERTS}], ids=["dense", "experts"])
def test_a_model_with_scales_of_blocks_is_near_the_model_of_its_values(changes):
    model, same = models(torch.float32, **changes)
    token_ids, positions = torch.arange(7) * 7, torch.arange(7)
    with torch.inference_mode():
        found, expected = (
            each.project(each(token_ids, positions, one_sequence(each.config, 7)[1])) for each in (model, same)
        )
    assert (found - expected).norm() / expected.norm() < 0.06  # the rows of inputs are in fp8


def test_experts_whose_parts_are_no_blocks_are_refused():
    with pytest.raises(ValueError, match="parts of 64, 64 rows: with scales of 128 x 128 blocks"):
        models(torch.float32, mlp=ExpertsConfig(count=4, chosen=2, width=64))


@needs_triton
@kernels
@pytest.mark.skipif(not INTERPRETED, reason="attention here is the reference, on the CPU")
@pytest.mark.parametrize("tokens", [1, 7])
def test_the_decoder_of_few_rows_gives_what_a_model_of_the_same_weights_gives(tokens):
    from services.worker.models.skinny_cuda import SkinnyDecoder

    token_ids, positions = torch.arange(tokens) * 7, torch.arange(tokens)
    with torch.inference_mode():
        found, expected = (
            SkinnyDecoder(each)(
                token_ids,
                positions,
                PlainRotatingStep(
                    each.config, each.rotaries[0], positions, one_sequence(each.config, tokens, each.dtype)[1]
                ),
            )
            for each in models(torch.float16)
        )
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
