"""The kernel of Hopper for experts with scales of groups, and what prepares its inputs, against plain torch."""

import pytest
import torch

from services.worker.layers.cuda_devices import is_hopper
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.test_expert_kernels import ACTIVATIONS, HALF, Case, check_half, in_groups, random

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]


@pytest.mark.parametrize(("tokens", "chosen", "rows"), [(1, 1, 128), (300, 2, 64)])
def test_rows_of_the_tokens_of_an_expert_are_gathered(tokens, chosen, rows):
    from services.worker.layers.gluon_experts import gather
    from services.worker.layers.triton_routing import sort_pairs

    x, experts = random(tokens, 1100, dtype=HALF), torch.arange(tokens * chosen, device=DEVICE).view(tokens, -1) % 5
    blocks = sort_pairs(experts.int(), 1, 3, rows)
    gathered = gather(x, blocks, experts.numel())
    block = 0
    for expert in range(1, 4):
        pairs = torch.where(experts.flatten() == expert)[0]
        for some in pairs.split(rows) if len(pairs) else ():
            found = gathered[block * rows : (block + 1) * rows]
            assert torch.equal(found[: len(some)], x[some // chosen])
            assert not found[len(some) :].any()
            block += 1
    assert block == int(blocks.used)


@pytest.mark.parametrize("activation", ["silu", None])
def test_a_block_of_codes_is_lines_of_one_expert(activation):
    """With an activation, it is eight gates, their eight factors, and so on."""
    from services.worker.layers.gluon_experts import _slices

    experts, outputs = 3, 2 * 272
    numbers = torch.arange(experts * outputs, dtype=torch.int16, device=DEVICE).view(experts, outputs, 1)
    described = _slices(numbers.repeat(1, 1, 32).view(torch.uint8), 32, activation)
    lines = torch.as_strided(described.base, described.shape, described.strides)
    line = torch.arange(128, device=DEVICE)
    for expert in range(experts):
        for first in (0, 128) if activation is None else (0, 64, 128):
            begin = (expert * outputs + first) // (16 if activation is None else 8)
            found = lines[begin : begin + described.block_shape[0]].flatten(0, 2)
            gates = first + line // 16 * 8 + line % 8
            expected = first + line if activation is None else gates + line // 8 % 2 * (outputs // 2)
            assert torch.equal(found, (numbers[expert, expected]).expand(128, 32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "group", "hidden", "width", "offsets", "floats"),
    [
        (4, 32, 192, 64, False, False), (4, 64, 192, 576, True, False), (4, 128, 256, 1152, False, False),
        (4, 128, 1152, 128, True, False), (8, 32, 192, 576, False, False), (8, 64, 320, 192, False, False),
        (8, 128, 384, 1152, False, False),
        (4, 32, 192, 576, False, True), (4, 32, 2880, 64, False, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("tokens", "rows"), [(1, 64), (90, 64), (90, 128), (700, 128), (700, 256)])
@pytest.mark.parametrize("biases", [False, True])
def test_kernel_of_hopper_gives_what_plain_torch_gives(
    tokens, rows, biases, bits, group, hidden, width, offsets, floats
):
    """Blocks of experts of other ranks are left out, and results are added."""
    from services.worker.layers.gluon_experts import supports_wide
    from services.worker.layers.triton_experts import mix_wide

    if not is_hopper(DEVICE):  # before the weights, which take long to make
        pytest.skip("this GPU has no tensor cores of Hopper")
    case = Case(tokens, biases=biases, hidden=hidden, width=width, dtype=torch.bfloat16, held=range(1, 5))
    case.weights = in_groups(case.weights, bits, group, offsets, floats)
    if not supports_wide(case.weights, case.x):
        pytest.skip("this GPU has no tensor cores of Hopper")
    for add in (False, True):
        output = torch.full_like(case.x, 3.0 if add else torch.nan)
        mix_wide(case.x, case.routes, case.weights, "silu", rows=rows, output=output, add=add)
        check_half(output, case.expected() + (3 if add else 0))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("bits", "group", "hidden", "width", "offsets", "floats"),
    [(4, 64, 192, 576, True, False), (8, 128, 384, 1152, False, False), (4, 32, 2880, 64, False, True)],
)
@pytest.mark.parametrize("rows", [64, 128, 256])
def test_a_program_multiplies_many_blocks(monkeypatch, rows, bits, group, hidden, width, offsets, floats):
    from services.worker.layers import gluon_experts
    from services.worker.layers.triton_experts import mix_wide

    monkeypatch.setattr(gluon_experts, "multiprocessors", lambda _: 3)
    case = Case(2500, hidden=hidden, width=width, dtype=torch.bfloat16, held=range(1, 5))
    case.weights = in_groups(case.weights, bits, group, offsets, floats)
    if not gluon_experts.supports_wide(case.weights, case.x):
        pytest.skip("this GPU has no tensor cores of Hopper")
    output = torch.full_like(case.x, torch.nan)
    mix_wide(case.x, case.routes, case.weights, "silu", rows=rows, output=output, add=False)
    check_half(output, case.expected())


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_a_captured_mixture_takes_any_routing(monkeypatch):
    """Also one in which no token chooses an expert of this rank."""
    from services.worker.layers import gluon_experts, triton_experts

    case = Case(700, hidden=128, width=256, dtype=torch.bfloat16, held=range(1, 5))
    case.weights = in_groups(case.weights, 4, 64)
    if not gluon_experts.supports_wide(case.weights, case.x):
        pytest.skip("this GPU has no tensor cores of Hopper")
    calls, mix_wide = [], triton_experts.mix_wide
    monkeypatch.setattr(triton_experts, "mix_wide", lambda *parts, **more: calls.append(1) or mix_wide(*parts, **more))
    case.mixed()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.mixed()
    assert len(calls) == 2
    for pair in ((3, 1), (0, 5), (2, 4)):
        case.routes.experts.copy_(torch.tensor([pair]).expand(700, 2))
        graph.replay()
        check_half(found, case.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernel_of_hopper_has_all_activations(activation):
    from services.worker.layers.gluon_experts import supports_wide
    from services.worker.layers.triton_experts import mix_wide

    case = Case(200, hidden=128, width=128, dtype=torch.float16)
    case.weights = in_groups(case.weights, 4, 128)
    if not supports_wide(case.weights, case.x):
        pytest.skip("this GPU has no tensor cores of Hopper")
    output = torch.empty_like(case.x)
    mix_wide(case.x, case.routes, case.weights, activation, rows=128, output=output, add=False)
    check_half(output, case.expected(activation))


@pytest.mark.parametrize(
    ("bits", "group", "offsets", "floats", "dtype", "taken"),
    [
        (4, 32, True, False, torch.float16, True), (8, 64, False, False, torch.bfloat16, True),
        (8, 64, True, False, torch.bfloat16, False), (8, 32, False, False, torch.bfloat16, True),
        (4, 32, False, True, torch.bfloat16, True), (4, 32, False, True, torch.float16, False),
    ],
)  # fmt: skip
def test_what_the_kernel_of_hopper_takes(monkeypatch, bits, group, offsets, floats, dtype, taken):
    from services.worker.layers import gluon_experts

    case = Case(1, hidden=64, width=64, dtype=dtype)
    weights = in_groups(case.weights, bits, group, offsets, floats)
    for hopper in (False, True):
        monkeypatch.setattr(gluon_experts, "is_hopper", lambda _, hopper=hopper: hopper)
        assert gluon_experts.supports_wide(weights, case.x) == (taken and hopper)
        assert not gluon_experts.supports_wide(case.weights, case.x)
