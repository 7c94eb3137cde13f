"""The kernels that choose the experts of tokens and sort pairs by expert, against plain torch."""

import pytest
import torch

from services.worker.described.layer import RouterConfig
from services.worker.layers import experts as plain
from services.worker.layers.experts import Routes
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]

ROUTERS = {
    "softmax": RouterConfig(),
    "normalized": RouterConfig(normalized=True, scale=2.5),
    "softmax of chosen": RouterConfig(scores="softmax_of_chosen"),
    "sigmoid": RouterConfig(scores="sigmoid"),
    "sigmoid with correction": RouterConfig(scores="sigmoid", normalized=True, correction_bias=True, scale=1.5),
    "groups": RouterConfig(scores="sigmoid", normalized=True, correction_bias=True, groups=4, chosen_groups=2),
    "groups of softmax": RouterConfig(groups=4, chosen_groups=3),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def check_route(logits: torch.Tensor, router: RouterConfig, chosen: int) -> None:
    from services.worker.layers.cuda_kernels import CudaKernels
    from services.worker.layers.triton_routing import route

    correction = random(logits.shape[1], seed=3) if router.correction_bias else None
    expected = plain.route(logits, router, chosen, correction)
    rules = router.scores, router.normalized, router.groups, router.chosen_groups, router.scale
    load, before = (torch.arange(logits.shape[1], device=DEVICE) for _ in range(2))
    found = Routes(*route(logits, correction, load, *rules, chosen))
    assert torch.equal(load, before + found.experts.flatten().bincount(minlength=len(load)))
    assert found.experts.dtype == torch.int32
    assert torch.equal(found.experts, expected.experts)
    torch.testing.assert_close(found.weights, expected.weights, rtol=1e-5, atol=1e-7, equal_nan=True)
    if not INTERPRETED:
        as_operator = CudaKernels().route(logits, router, chosen, correction)
        assert torch.equal(as_operator.experts, expected.experts)


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
@pytest.mark.parametrize(("count", "chosen"), [(128, 8), (12, 3), (20, 1)])
def test_routes(router, count, chosen):
    check_route(random(5, count), router, chosen)
    check_route(random(2, count, seed=1, dtype=torch.bfloat16), router, chosen)  # equal scores are likely


@pytest.mark.parametrize(("count", "chosen"), [(1024, 32), (8, 8), (1, 1), (513, 10)])
def test_routes_of_many_and_few_experts(count, chosen):
    check_route(random(2, count), ROUTERS["normalized"], chosen)


def test_of_equal_scores_the_expert_with_the_lower_number_comes_first():
    logits = torch.tensor([[0.0, -0.0, 0.0, -0.0, 1.0, -torch.inf], [-torch.inf] * 5 + [0.0]], device=DEVICE)
    for router in (ROUTERS["softmax"], ROUTERS["softmax of chosen"], ROUTERS["sigmoid"]):
        check_route(logits, router, 4)
    check_route(torch.zeros(2, 32, device=DEVICE), ROUTERS["groups of softmax"], 6)


def test_logits_that_are_not_numbers_still_choose_existing_experts():
    from services.worker.layers.triton_routing import route

    logits = random(3, 20)
    logits[1] = torch.nan
    for router in ROUTERS.values():
        correction = random(20, seed=3) if router.correction_bias else None
        rules = router.scores, router.normalized, router.groups, router.chosen_groups, router.scale
        experts, weights = route(logits, correction, None, *rules, 3)
        assert ((experts >= 0) & (experts < 20)).all()
        assert all(len(set(row)) == 3 for row in experts.tolist())
        assert weights[1].isnan().all()
        assert weights[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize(
    ("first", "count", "tokens"), [(0, 6, 40), (2, 3, 40), (4, 2, 1), (0, 6, 300), (5, 1, 300), (1, 4, 2100)], ids=str
)
def test_pairs_are_in_blocks_of_their_expert(rows, first, count, tokens):
    from services.worker.layers.triton_routing import most_blocks, sort_pairs

    chosen, generator = 2, torch.Generator().manual_seed(tokens)
    experts = torch.stack([torch.randperm(6, generator=generator)[:chosen] for _ in range(tokens)])
    for case in (experts, experts * 0 + torch.arange(chosen), experts * 0 + first):
        found = sort_pairs(case.int().to(DEVICE), first, count, rows)
        used = int(found.used)
        assert used <= most_blocks(case.numel(), count, rows) == len(found.experts)
        pairs, of_block = found.pairs.view(-1, rows)[:used].tolist(), found.experts[:used].tolist()
        assert of_block == sorted(of_block)
        held: dict[int, list[int]] = {}
        for expert, block in zip(of_block, pairs, strict=True):
            held.setdefault(expert + first, []).extend(block)
        flat = case.flatten().tolist()
        for expert in range(first, first + count):
            own = [pair for pair, each in enumerate(flat) if each == expert]
            padding = -len(own) % rows
            assert held.get(expert, []) == own + [len(flat)] * padding


def test_the_number_of_blocks_does_not_depend_on_the_routing():
    """The worst routing reaches the bound: each expert has a pair, and one row more than fills its blocks."""
    from services.worker.layers.triton_routing import most_blocks

    for pairs, experts, rows in ((1, 8, 16), (7, 8, 16), (500, 8, 16), (4096, 128, 64), (100, 1, 16)):
        used = min(pairs, experts)
        worst = [1] * used
        worst[0] += pairs - used  # one expert has all others
        counts = [worst, [pairs], [pairs // used] * (used - 1) + [pairs - pairs // used * (used - 1)]]
        needed = [sum(-(-count // rows) for count in each) for each in counts]
        assert max(needed) <= most_blocks(pairs, experts, rows) <= pairs
    assert most_blocks(100, 1, 16) == 7
    assert most_blocks(8 * 17, 8, 16) == 16
