"""The kernels for mixtures of experts on CUDA, against plain torch."""

import itertools
from typing import get_args

import pytest
import torch

from services.worker.described.layer import Activation, RouterConfig
from services.worker.layers import experts as plain
from services.worker.layers.activations import gated
from services.worker.layers.block_fp8 import BLOCK, expand_blocks, quantize_blocks
from services.worker.layers.experts import ExpertWeights
from services.worker.layers.fp8 import quantize_rows
from services.worker.layers.grouped import GroupedLinear, GroupedRows
from tests.quick import quick_if
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

# The interpreter multiplies no numbers of bfloat16.
HALF = torch.float16 if INTERPRETED else torch.bfloat16
ACTIVATIONS = get_args(Activation)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check_half(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare values of 16 bits. Both round the products and their sums, in different orders."""
    assert (found.float() - expected.float()).abs().max() <= expected.float().abs().max() / 64


class Case:
    """Random experts, and the tokens that are routed to them."""

    def __init__(
        self, tokens: int, *, hidden: int = 48, width: int = 40, experts: int = 6, chosen: int = 2,
        held: range | None = None, biases: bool = False, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        held = held or range(experts)
        count = len(held)
        self.x = random(tokens, hidden, dtype=dtype)
        self.routes = plain.route(random(tokens, experts, seed=1), RouterConfig(normalized=True), chosen, None)
        self.weights = ExpertWeights(
            random(count, 2 * width, hidden, seed=2, dtype=dtype) / 4,
            random(count, hidden, width, seed=3, dtype=dtype) / 4,
            random(count, 2 * width, seed=4, dtype=dtype) if biases else None,
            random(count, hidden, seed=5, dtype=dtype) if biases else None,
            held.start,
        )

    def quantize(self) -> None:
        parts = {}
        for name in ("gate_up", "down"):
            whole = getattr(self.weights, name)
            values, scale = quantize_rows(whole.flatten(0, 1))
            parts |= {name: values.view(whole.shape), f"{name}_scale": scale.view(whole.shape[:2])}
        self.weights = self.weights._replace(**parts)

    def mixed(self, activation: str = "silu") -> torch.Tensor:
        from services.worker.layers.triton_experts import mix_experts

        return mix_experts(self.x, *self.routes, *self.weights, activation)

    def expected(self, activation: str = "silu") -> torch.Tensor:
        return plain.mix(self.x, self.routes, self.weights, activation)

    def check_added(self) -> None:
        from services.worker.layers.triton_experts import add_experts

        onto = random(*self.x.shape, seed=9)
        expected = onto + self.expected()
        add_experts(onto, self.x, *self.routes, *self.weights, "silu")
        torch.testing.assert_close(onto, expected, rtol=1e-4, atol=1e-4)

    def check(self, activation: str = "silu") -> None:
        torch.testing.assert_close(self.mixed(activation), self.expected(activation), rtol=1e-4, atol=1e-4)

    def check_half(self) -> None:
        check_half(self.mixed(), self.expected())


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_mixture(activation, biases):
    Case(5, biases=biases).check(activation)
    Case(37, biases=biases).check(activation)


@pytest.mark.parametrize("tokens", [3, 30])
def test_a_mixture_is_added_to_other_values(tokens):
    Case(tokens, held=range(2, 5)).check_added()


@pytest.mark.parametrize("tokens", [1, 16, 17, 130])
def test_a_mixture_of_few_and_many_tokens(tokens):
    Case(tokens, dtype=HALF, biases=True).check_half()


def test_a_mixture_with_blocks_of_every_size():
    """The tables' tiles depend on the number of pairs per expert."""
    from services.worker.layers.expert_tiles import changes

    for tokens in changes(2, 2, 2):
        for count in (tokens - 1, tokens) if tokens < 200 else ():
            Case(count, experts=2, dtype=HALF, hidden=32, width=16).check_half()


@pytest.mark.parametrize(("experts", "chosen"), [(128, 8), (8, 2), (4, 4), (1, 1)])
@pytest.mark.parametrize(("item", "groups"), [(1, False), (1, True), (2, False), (4, False)])
def test_other_kernels_run_exactly_where_the_boot_expects_them(experts, chosen, item, groups):
    """With scales of groups, those of tiles and those of Hopper."""
    from services.worker.layers.expert_tiles import (
        FEW_PAIRS,
        MANY_PAIRS,
        MOST_STREAMED_PAIRS,
        changes,
        choose_tiles,
        choose_wide_rows,
    )

    def kernels(tokens: int) -> tuple:
        pairs = tokens * chosen
        limits = MOST_STREAMED_PAIRS, FEW_PAIRS, MANY_PAIRS
        rows = choose_wide_rows(pairs, experts) if groups else None
        return rows, choose_tiles(pairs, experts, item, groups=groups), *(pairs <= limit for limit in limits)

    found = [tokens for tokens in range(2, 3000) if kernels(tokens) != kernels(tokens - 1)]
    assert found == [tokens for tokens in changes(experts, chosen, item, groups=groups) if 1 < tokens < 3000]


@pytest.mark.parametrize("tokens", [3, 100])
def test_all_tokens_to_one_expert(tokens):
    case = Case(tokens, chosen=1)
    case.routes.experts.fill_(4)
    case.check()


@pytest.mark.parametrize("tokens", [3, 60])
@pytest.mark.parametrize("held", [range(3), range(3, 6), range(5, 6)], ids=str)
def test_a_rank_with_some_of_the_experts(tokens, held):
    Case(tokens, held=held, biases=True).check()


def test_a_rank_none_of_whose_experts_is_chosen():
    for tokens in (3, 60):
        case = Case(tokens, held=range(3), chosen=1)
        case.routes.experts.fill_(5)
        assert (case.mixed() == 0).all()


def test_the_sum_of_ranks_is_the_whole():
    whole = Case(60)
    parts = []
    for held in (range(2), range(2, 6)):
        case = Case(60, held=held)
        case.weights = whole.weights._replace(
            gate_up=whole.weights.gate_up[held.start : held.stop], down=whole.weights.down[held.start : held.stop],
            first=held.start,
        )  # fmt: skip
        parts.append(case.mixed())
    torch.testing.assert_close(sum(parts), whole.expected(), rtol=1e-4, atol=1e-4)


def quantized_mix(case: Case, activation: str) -> torch.Tensor:
    """Return the mixture with the inputs of both products quantized as the scales of the weights are."""
    weights, total = case.weights, torch.zeros(case.x.shape, device=DEVICE)
    block = BLOCK if plain.has_blocks(weights.gate_up_scale) else None
    x = dequantized(case.x, block)
    for index in range(len(weights.down)):
        tokens, choices = torch.where(case.routes.experts == weights.first + index)
        if not len(tokens):
            continue
        inner = x[tokens] @ scaled(weights.gate_up[index], weights.gate_up_scale[index]).t()
        inner = inner if weights.gate_up_bias is None else inner + weights.gate_up_bias[index]
        inner = dequantized(gated(inner, activation).to(case.x.dtype), block)
        rows = inner @ scaled(weights.down[index], weights.down_scale[index]).t()
        rows = rows if weights.down_bias is None else rows + weights.down_bias[index]
        total.index_add_(0, tokens, rows * case.routes.weights[tokens, choices].unsqueeze(1))
    return total


def scaled(matrix: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return matrix.float() * (scale.unsqueeze(1) if scale.dim() == 1 else expand_blocks(scale, *matrix.shape))


def dequantized(rows: torch.Tensor, block: int | None) -> torch.Tensor:
    from services.worker.layers.triton_rows import quantize

    values, scale = quantize(rows, block)
    return values.float() * (scale if block is None else scale.repeat_interleave(block, dim=1)[:, : rows.shape[1]])


@pytest.mark.parametrize("biases", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("tokens", [3, 60])
def test_a_mixture_in_fp8(tokens, biases):
    case = Case(tokens, biases=biases, hidden=64, width=48, dtype=HALF, held=range(1, 5))
    case.quantize()
    found, expected = case.mixed("clamped_swiglu").float(), quantized_mix(case, "clamped_swiglu")
    assert (found - expected).norm() / expected.norm() < 0.02


# Bits, group, hidden size and width. The halves of a tile are in one group or in two, and tiles have 32 to 128 inputs.
GROUPED = [(4, 32, 64, 96), (4, 64, 192, 64), (4, 128, 128, 256), (8, 32, 96, 32), (8, 128, 128, 128)]


def in_groups(
    weights: ExpertWeights, bits: int, group: int, offsets: bool = False, floats: bool = False
) -> ExpertWeights:
    """Return weights with scales, and offsets that are far from each other, of groups."""
    parts = {}
    for name in ("gate_up", "down"):
        whole = getattr(weights, name)
        one = GroupedLinear(whole.shape[2], whole.shape[1], bits=bits, group=group, offsets=offsets, floats=floats)
        codes = torch.zeros(len(whole), *one.codes.shape, dtype=torch.uint8, device=DEVICE)
        scales = torch.zeros(len(whole), 1 + offsets, *one.scales.shape, dtype=one.scales.dtype, device=DEVICE)
        for index, matrix in enumerate(whole):
            expert = plain.grouped_weights(codes[index], scales[index], matrix.shape[1])
            GroupedRows(expert, 0, len(matrix)).copy_(matrix)
        if offsets:
            scales[:, 1] = random(*scales[:, 1].shape, seed=6) / 8
        parts |= {name: codes, f"{name}_scale": scales}
    return weights._replace(**parts)


@pytest.mark.parametrize(("bits", "group", "hidden", "width"), GROUPED)
@pytest.mark.parametrize(
    ("offsets", "tokens"),
    quick_if(lambda offsets, tokens: offsets == (tokens == 60), itertools.product([False, True], [3, 60])),
)
def test_a_mixture_of_integers(tokens, offsets, bits, group, hidden, width):
    """Three tokens are streamed, and sixty are sorted."""
    case = Case(tokens, biases=offsets, hidden=hidden, width=width, dtype=HALF, held=range(1, 5))
    case.weights = in_groups(case.weights, bits, group, offsets)
    case.check_half()


@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (192, 64)])
@pytest.mark.parametrize("tokens", [3, 60, pytest.param(200, marks=pytest.mark.slow)])
def test_a_mixture_in_mxfp4(tokens, hidden, width):
    """All 16 values occur."""
    case = Case(tokens, biases=True, hidden=hidden, width=width, dtype=HALF, held=range(1, 5))
    case.weights = in_groups(case.weights, 4, 32, floats=True)
    assert case.weights.down_scale.dtype == torch.uint8
    assert len((case.weights.down & 15).unique()) == len((case.weights.down >> 4).unique()) == 16
    case.check_half()


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("activation", quick_if({"silu", "clamped_swiglu"}.__contains__, ACTIVATIONS))
def test_integers_with_blocks_of_every_size(activation, offsets):
    """With many rows, weights are scaled instead of sums. Some blocks have rows without a pair."""
    from services.worker.layers.expert_tiles import changes

    for tokens in (each for each in changes(2, 2, 1) if each < 200):
        case = Case(tokens, experts=2, hidden=64, width=32, dtype=HALF)
        case.weights = in_groups(case.weights, 4, 32, offsets)
        check_half(case.mixed(activation), case.expected(activation))


def in_blocks(weights: ExpertWeights) -> ExpertWeights:
    """Return fp8 weights with scales of blocks of 128 x 128."""
    parts = {}
    for name in ("gate_up", "down"):
        whole = getattr(weights, name)
        values, scales = zip(*(quantize_blocks(matrix) for matrix in whole), strict=True)
        parts |= {name: torch.stack(values), f"{name}_scale": torch.stack(scales)}
    return weights._replace(**parts)


@pytest.mark.parametrize(("hidden", "width"), [(128, 256), (192, 128)])
@pytest.mark.parametrize("tokens", [2, 60])
def test_a_mixture_in_fp8_with_scales_of_blocks(tokens, hidden, width):
    """The scales of blocks are far from each other."""
    case = Case(tokens, biases=True, hidden=hidden, width=width, dtype=HALF, held=range(1, 5))
    case.weights = case.weights._replace(
        gate_up=case.weights.gate_up * torch.where(torch.arange(2 * width, device=DEVICE) < width, 0.5, 0.01)[:, None],
        down=case.weights.down * torch.exp2(torch.arange(width, device=DEVICE) // BLOCK * 3.0),
    )
    case.weights = in_blocks(case.weights)
    found, expected = case.mixed().float(), quantized_mix(case, "silu")
    assert (found - expected).norm() / expected.norm() < 0.02
    assert (found - case.expected().float()).norm() / expected.norm() < 0.1


def test_tiles_for_scales_of_blocks_have_one_scale_per_iteration():
    from services.worker.layers.expert_tiles import choose_tiles

    for pairs, scales in itertools.product((8, 300, 3000, 100_000), ("blocks", "groups")):
        tiles = choose_tiles(pairs, 128, 1, **{scales: True})
        assert max(*tiles.gate_up[:2], *tiles.down[:2]) <= BLOCK


def test_operators_declare_the_shapes_of_their_results():
    """Tensors of ``meta`` show the shapes, on which torch.compile relies."""
    from services.worker.layers import triton_experts, triton_routing  # noqa: F401 (registers the operators)

    meta, case = torch.device("meta"), Case(5, dtype=torch.bfloat16, biases=True)
    logits, load = torch.empty(5, 6, device=meta, dtype=torch.bfloat16), torch.empty(6, device=meta, dtype=torch.int64)
    found = torch.ops.tokasaurus.route(logits, None, load, "softmax", True, 1, 1, 1.0, 2)
    for each, expected in zip(found, case.routes, strict=True):
        assert (each.shape, each.dtype) == (expected.shape, expected.dtype)
    x, *arguments = (
        each.to(meta) if torch.is_tensor(each) else each for each in (case.x, *case.routes, *case.weights, "silu")
    )
    mixed = torch.ops.tokasaurus.mix_experts(x, *arguments)
    assert (mixed.shape, mixed.dtype, mixed.is_meta) == (case.x.shape, case.x.dtype, True)
    assert torch.ops.tokasaurus.add_experts(x, x, *arguments) is None


needs_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
WORST = torch.tensor([[3, 0]])  # all tokens to the same two experts


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_a_captured_mixture_takes_any_routing(tokens):
    case = Case(tokens, biases=True, dtype=HALF)
    case.mixed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.mixed()
    for seed in range(3):
        other = plain.route(random(tokens, 6, seed=seed), RouterConfig(), 2, None)
        case.routes.experts.copy_(WORST.expand(tokens, 2) if seed == 2 else other.experts)
        case.routes.weights.copy_(other.weights)
        graph.replay()
        check_half(found, case.expected())


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 1000, 5000])
def test_the_worst_routing_needs_no_more_memory_than_others(tokens):
    peaks = []
    for worst in (False, True):
        case = Case(tokens, dtype=HALF, hidden=256, width=128)
        if worst:
            case.routes.experts.copy_(WORST.expand(tokens, 2))
        case.mixed()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.mixed()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del case
    assert peaks[0] == peaks[1] > 0


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 40, 3000])
def test_experts_of_a_real_size(tokens):
    """The sizes of Qwen3-30B-A3B, but for the number of experts, in bf16, in fp8, as integers and in MXFP4."""
    case = Case(tokens, hidden=2048, width=768, experts=16, chosen=8, dtype=torch.bfloat16)
    expected = case.expected().float()
    assert (case.mixed().float() - expected).norm() / expected.norm() < 0.01
    exact = case.weights
    case.quantize()
    assert (case.mixed().float() - expected).norm() / expected.norm() < 0.1
    for bits, group, *others in ((4, 128), (4, 32, True), (8, 128, True), (4, 32, False, True)):
        case.weights = in_groups(exact, bits, group, *others)
        expected = case.expected().float()
        assert (case.mixed().float() - expected).norm() / expected.norm() < 0.01
