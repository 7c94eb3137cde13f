"""Linear layers of integers with scales for groups of inputs, and their kernels."""

import pytest
import torch
import torch.nn.functional as F

from services.common.model.quantized.scheme import Scheme
from services.worker.layers.cuda_devices import is_hopper
from services.worker.layers.grouped import GroupedLinear, GroupedWeights, packed, tile_size, to_grouped, unpacked
from services.worker.layers.quantized_weight import QuantizedWeight
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton

# The interpreter multiplies no bfloat16.
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
EPS = 1e-5
OUTPUTS = 72
# Bits, group and inputs.
SIZES = [(4, 32, 160), (4, 32, 192), (4, 64, 1088), (4, 128, 640), (4, 256, 512), (8, 32, 160), (8, 128, 1152)]


def quantized(codes, scales, zeros=None, columns=None, bits=4) -> QuantizedWeight:
    """Return a weight. Of its scheme, only ``bits`` matters."""
    return QuantizedWeight(Scheme("plain", "int", bits, None), codes, scales, zeros, columns)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make(bits: int, group: int, inputs: int, outputs=OUTPUTS, *, bias=False, offsets=False, seed=1) -> GroupedLinear:
    """Return a layer of random weights. With ``offsets``, they are random too."""
    linear = GroupedLinear(inputs, outputs, bias, bits=bits, group=group, offsets=offsets).to(DEVICE)
    names = [str(index) for index in range(len(linear.outputs))]
    for index, name in enumerate(names):
        target = linear.targets(*names)[f"{name}.weight"]
        target.copy_(random(*target.shape, seed=seed + index, dtype=torch.float32) / 4)
    if offsets:
        linear.offsets.copy_(random(*linear.offsets.shape, seed=seed, dtype=torch.float32) / 8)
    if bias:
        linear.bias.data = random(len(linear.bias), seed=seed + 7)
    return linear


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 2**-8 if torch.float16 == DTYPE else 2**-6
    torch.testing.assert_close(found.float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


def expected_product(x: torch.Tensor, linear: GroupedLinear) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.float()
    return F.linear(x.float(), linear.dequantized(), bias)


@pytest.mark.parametrize("tile", [32, 64, 128])
def test_the_halves_of_a_byte_are_halves_of_a_tile(tile):
    codes = torch.randint(0, 16, (3, 2 * tile), dtype=torch.uint8)
    pairs = packed(codes, tile)
    assert torch.equal(pairs[:, 0], codes[:, 0] | codes[:, tile // 2] << 4)
    assert torch.equal(unpacked(pairs, tile), codes)


@pytest.mark.parametrize(
    ("bits", "group", "inputs", "tile"),
    [(4, 32, 96, 32), (4, 32, 128, 64), (8, 32, 128, 32), (4, 64, 128, 64), (4, 96, 192, 32), (4, 4096, 4096, 128)],
)
def test_half_a_tile_is_within_a_group(bits, group, inputs, tile):
    assert tile_size(bits, group, inputs) == tile


@pytest.mark.parametrize("bits", [4, 8])
def test_values_are_rounded_to_the_nearest(bits):
    weight = torch.randn(8, 256)
    linear = GroupedLinear(256, 8, bits=bits, group=64)
    linear.targets("a")["a.weight"].copy_(weight)
    step = linear.scales.t().abs().repeat_interleave(64, dim=1)
    # The largest value of a group has no code if its opposite has one.
    slack = 1 + (weight.abs() > 7.5 * step) if bits == 4 else 1
    assert bool(((linear.dequantized() - weight).abs() <= 0.5 * slack * step * 1.0001).all())


def test_groups_of_zeros_stay_zeros_and_values_that_are_not_finite_stay_visible():
    weight = torch.zeros(2, 64)
    weight[1, 0] = torch.nan
    linear = GroupedLinear(64, 2, bits=4, group=32)
    linear.targets("a")["a.weight"].copy_(weight)
    assert torch.equal(linear.dequantized()[0], torch.zeros(64))
    assert bool(linear.dequantized()[1, :32].isnan().all())


@pytest.mark.parametrize(("inputs", "group"), [(256, 128), (192, 64), (160, 32)])
def test_groups_are_as_large_as_the_inputs_allow(inputs, group):
    assert GroupedLinear(inputs, 8, bits=4).group == group


@pytest.mark.parametrize(("bits", "group", "inputs"), [(3, 32, 64), (4, 48, 96), (4, 64, 96)])
def test_other_groups_are_refused(bits, group, inputs):
    with pytest.raises(ValueError, match="expected 4 or 8 bits, and groups of a multiple of 32 inputs"):
        GroupedLinear(inputs, 8, bits=bits, group=group)


@pytest.mark.parametrize(("bits", "signed"), [(4, False), (8, False), (8, True)])
@pytest.mark.parametrize("zeros", [True, False])
def test_weights_of_integers_are_stored_without_a_change(bits, signed, zeros):
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if signed else (0, 1 << bits)
    codes = torch.randint(low, high, (5, 128)).to(torch.int8 if signed else torch.uint8)
    scales = torch.rand(5, 4).half()
    points = torch.randint(low, high, (5, 4)) if zeros else None
    linear = GroupedLinear(128, (3, 5), bits=bits, group=32, offsets=True)
    target = linear.targets("a", "b")["b.weight"]
    target.copy_quantized(quantized(codes, scales, points, bits=bits))
    found = torch.empty(5, 128)
    target.copy_to(found)
    expanded = [each.float().repeat_interleave(32, dim=1) for each in (scales, points) if each is not None]
    expected = (codes.float() - (expanded[1] if zeros else 0)) * expanded[0]
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)


def test_a_symmetric_weight_needs_no_offsets():
    codes, scales = torch.randint(0, 16, (4, 64), dtype=torch.uint8), torch.rand(4, 1)
    linear = GroupedLinear(64, 4, bits=4, group=32)
    target = linear.targets("a")["a.weight"]
    target.copy_quantized(quantized(codes, scales, torch.full((4, 1), 8)))
    assert torch.equal(linear.dequantized(), (codes.float() - 8) * scales)
    with pytest.raises(ValueError, match="its settings say that it has none"):
        target.copy_quantized(quantized(codes, scales, torch.full((4, 1), 7)))


def test_scales_that_are_not_finite_are_no_zero_points():
    linear = GroupedLinear(32, 2, bits=4, group=32)
    codes, zeros = torch.full((2, 32), 9, dtype=torch.uint8), torch.full((2, 1), 8)
    scales = torch.tensor([[float("nan")], [2.0]])
    linear.targets("a")["a.weight"].copy_quantized(quantized(codes, scales, zeros))
    assert linear.dequantized()[0].isnan().all()
    assert linear.dequantized()[1].tolist() == [2.0] * 32


def test_inputs_are_sorted_by_group():
    order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
    columns = torch.arange(128)[order] // 32
    codes, scales = torch.randint(0, 16, (6, 128), dtype=torch.uint8), torch.rand(6, 4)
    linear = GroupedLinear(128, (2, 4), bits=4, group=32, ordered=True)
    targets, zeros = linear.targets("a", "b"), torch.full((1, 4), 8)
    for name, part in (("b", slice(2, 6)), ("a", slice(0, 2))):  # files have the parts in any order
        targets[f"{name}.weight"].copy_quantized(
            quantized(codes[part], scales[part], zeros.expand(len(scales[part]), -1), columns)
        )
    weight = (codes.float() - 8) * scales[:, columns]
    assert torch.equal(linear.dequantized(), weight)
    x = torch.randn(3, 128)
    torch.testing.assert_close(linear(x), x @ weight.t())
    in_order = GroupedWeights.of(linear)._replace(order=None)  # kernels multiply these by rows in this order
    torch.testing.assert_close(x.index_select(1, linear.order) @ in_order.dequantized().t(), x @ weight.t())
    with pytest.raises(ValueError, match=r"its order of inputs .* differs from that of another part"):
        targets["b.weight"].copy_quantized(quantized(codes[2:], scales[2:], zeros.expand(4, 4), columns.flip(0)))
    # New weights keep the order.
    targets["a.weight"].copy_(weight[:2])
    torch.testing.assert_close(linear.dequantized()[:2], weight[:2], rtol=0.2, atol=0.1)


def test_groups_of_different_sizes_are_refused():
    linear = GroupedLinear(64, 2, bits=4, group=32, ordered=True)
    columns = torch.zeros(64, dtype=torch.int64)
    columns[:20] = 1
    with pytest.raises(ValueError, match="the groups have 20 to 44 inputs"):
        linear.targets("a")["a.weight"].copy_quantized(
            quantized(torch.zeros(2, 64, dtype=torch.uint8), torch.ones(2, 2), None, columns)
        )


def test_parts_and_biases_are_loaded_by_name():
    linear = GroupedLinear(64, (3, 5), True, bits=8)
    targets = linear.targets("a", "b")
    assert {name: tuple(each.shape) for name, each in targets.items()} == {
        "a.weight": (3, 64), "b.weight": (5, 64), "a.bias": (3,), "b.bias": (5,),
    }  # fmt: skip
    weights = torch.randn(8, 64)
    for name, part, start in (("a", weights[:3], 1.0), ("b", weights[3:], 2.0)):
        targets[f"{name}.weight"].copy_(part)
        targets[f"{name}.bias"].data.fill_(start)
    x, total = torch.randn(4, 64), torch.ones(4, 8)
    expected = x @ linear.dequantized().t() + torch.tensor([1.0] * 3 + [2.0] * 5)
    torch.testing.assert_close(linear(x), expected)
    assert linear(x, total) is total
    torch.testing.assert_close(total, expected + 1)


kernels = pytest.mark.usefixtures("triton_ready")


def launch(x: torch.Tensor, linear: GroupedLinear) -> torch.Tensor:
    from services.worker.layers.triton_grouped import grouped_product

    return grouped_product(x, linear.codes, linear.scales, linear.offsets, linear.bias, linear.bits)


@needs_triton
@kernels
@pytest.mark.parametrize(("bits", "group", "inputs"), SIZES)
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 16, 19, 70])
def test_kernels_give_what_dequantized_weights_give(rows, offsets, bits, group, inputs):
    linear = make(bits, group, inputs, bias=rows > 1, offsets=offsets)
    x = random(rows, inputs)
    check(launch(x, linear), expected_product(x, linear))


@needs_triton
@kernels
@pytest.mark.parametrize("scale_sums", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("bits", [4, 8])
def test_inputs_can_be_split_over_programs(bits, splits, scale_sums):
    from services.worker.layers.triton_grouped import TilesOptions, launch_tiles

    linear = make(bits, 32, 160, bias=True)
    x, out = random(40, 160), torch.empty(40, OUTPUTS, dtype=DTYPE, device=DEVICE)
    launch_tiles(x, GroupedWeights.of(linear), out, TilesOptions(32, 32, splits, scale_sums, 4, 2))
    check(out, expected_product(x, linear))


@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("bits", "group", "inputs", "offsets"),
    [
        (4, 32, 192, False), (4, 32, 192, True), (4, 64, 1088, False), (4, 64, 1088, True), (4, 128, 4096, False),
        (4, 384, 768, True), (4, 1152, 1152, False), (8, 32, 192, False), (8, 32, 4096, False),
        (8, 64, 1088, False), (8, 128, 1152, False), (8, 256, 512, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 72), (33, 1000), (90, 264), (300, 5000), (1000, 5000), (3000, 5000)])
def test_kernel_of_hopper_gives_what_dequantized_weights_give(rows, outputs, offsets, bias, bits, group, inputs, dtype):
    from services.worker.layers.triton_grouped import launch_wide, supports_wide

    if not is_hopper(DEVICE):  # before the weights, which take long to make
        pytest.skip("this GPU has no tensor cores of Hopper")
    linear = make(bits, group, inputs, outputs, bias=bias, offsets=offsets)
    if bias:
        linear.bias.data = linear.bias.to(dtype)
    if not supports_wide(GroupedWeights.of(linear)):
        pytest.skip("this GPU has no tensor cores of Hopper")
    x = random(rows, inputs, dtype=dtype)
    out = torch.full((rows, outputs), torch.nan, dtype=dtype, device=DEVICE)
    launch_wide(x, GroupedWeights.of(linear), out)
    check(out, expected_product(x, linear))


@needs_triton
@kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", [False, True])
def test_many_rows_are_multiplied_by_slices_of_the_weights(monkeypatch, offsets, bits):
    from services.worker.layers import triton_grouped

    monkeypatch.setattr(triton_grouped, "_SLICE_BYTES", 64 * 128 * 2)
    monkeypatch.setattr(triton_grouped, "_SMALLEST_SLICE", 64)
    linear = make(bits, 32, 128, 150, bias=bits == 4, offsets=offsets)
    x = random(520, 128)
    check(launch(x, linear), expected_product(x, linear))


@needs_triton
@kernels
def test_no_rows_give_no_results():
    assert launch(random(0, 64), make(4, 64, 64)).shape == (0, OUTPUTS)


@needs_triton
@kernels
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_norm_gate_bias_and_sum_are_part_of_the_product(rows, bits, offsets):
    from services.worker.layers.triton_skinny import skinny_product

    linear = make(bits, 32, 160, 2 * OUTPUTS, bias=True, offsets=offsets)
    x, norm, total = 3 * random(rows, 160), 1 + random(160, seed=2) / 4, random(rows, OUTPUTS, seed=4)
    normed = F.rms_norm(x.float(), (160,), norm.float(), EPS)
    gate, up = expected_product(normed, linear).chunk(2, dim=1)
    expected = F.silu(gate) * up + total.float()
    found = skinny_product(x, GroupedWeights.of(linear), norm=(norm, EPS), gated=True, onto=total)
    assert found is total
    check(found, expected)


@needs_triton
@kernels
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_sum_is_prepared_for_the_next_norm(rows):
    from services.worker.layers.triton_skinny import skinny_product, skinny_sum

    linear, following = make(4, 32, 160, 96), make(4, 32, 96, 48, seed=3)
    x, total, norm = random(rows, 160), random(rows, 96, seed=2), 1 + random(96, seed=5) / 4
    stream = total.float() + expected_product(x, linear)
    norm_input = skinny_sum(x, GroupedWeights.of(linear), total, norm)
    check(total, stream)
    check(norm_input.squares.sum(0), stream.square().sum(1))
    normed = F.rms_norm(stream, (96,), norm.float(), EPS)
    check(
        skinny_product(norm_input, GroupedWeights.of(following), norm=(norm, EPS)), expected_product(normed, following)
    )


def test_codes_of_a_rounded_weight_are_the_weight_again():
    weight = torch.randn(4, 64)
    codes, scales = to_grouped(weight, 4, 32)
    values = (codes.float() - 8) * scales.repeat_interleave(32, dim=1)
    again = to_grouped(values, 4, 32)
    assert torch.equal(again[0], codes)
    torch.testing.assert_close(again[1], scales)
