"""Every element of a model is on the ranks that need it, and nothing is there twice that should not be."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.worker.described.layer import ExpertsConfig
from services.worker.described.ranks import Ranks
from services.worker.described.shares import (
    RankShare,
    evenly,
    kv_heads_of,
    local_config,
    refuse_unshareable,
    vocabulary_of,
)
from services.worker.described.stages import balanced, head_cost, layers_of
from services.worker.models.load_targets import SliceTarget, slice_targets
from tests.worker.small_models import small_config


def everyone(tp_size: int) -> list[Ranks]:
    return [Ranks(tp_rank, tp_size) for tp_rank in range(tp_size)]


def test_whole_experts_need_experts():
    with pytest.raises(InvalidRequest, match="expert_parallel=T: the model has no experts, only dense layers"):
        refuse_unshareable(small_config(), 2, expert_parallel=True)


def test_ranks_are_numbered_stage_by_stage():
    grid = [Ranks(tp_rank, 3, pp_rank, 2) for pp_rank in range(2) for tp_rank in range(3)]
    assert [ranks.index for ranks in grid] == list(range(6))
    assert [grid[0].name(ranks.index) for ranks in grid] == [ranks.name() for ranks in grid]
    assert [(ranks.first, ranks.last, ranks.reports) for ranks in (grid[0], grid[3], grid[4])] == [
        (True, False, False),
        (False, True, True),
        (False, True, False),
    ]
    assert Ranks().alone
    assert Ranks().reports


@given(st.integers(1, 16), st.integers(1, 8), st.integers(0, 3), st.integers(0, 3))
def test_every_query_head_is_beside_its_key_head(groups, kv_heads, doubled, more):
    """``tp_size`` divides the key heads, or is a multiple of them."""
    tp_size = kv_heads * 2**doubled
    heads = tp_size * groups * 2**more
    config = small_config(heads=heads, kv_heads=kv_heads, intermediate_size=tp_size)
    for size in (tp_size, max(1, kv_heads // 2) if kv_heads % 2 == 0 else 1):
        refuse_unshareable(config, size)
        seen = []
        for ranks in everyone(size):
            own, keys = evenly(heads, ranks), kv_heads_of(config, ranks)
            local = local_config(config, ranks, range(1))
            assert (local.heads, local.kv_heads) == (own.size, keys.size)
            for head in range(own.size):  # as attention maps them
                assert keys.start + head // (local.heads // local.kv_heads) == (own.start + head) // (heads // kv_heads)
            seen += range(own.start, own.start + own.size)
        assert seen == list(range(heads))


@given(st.integers(1, 3000), st.integers(1, 64))
def test_ranks_have_the_vocabulary_in_order_and_equally_many_rows(vocab_size, tp_size):
    parts = [vocabulary_of(small_config(vocab_size=vocab_size), ranks) for ranks in everyone(tp_size)]
    rows = [token for share, _ in parts for token in range(share.start, share.start + share.size)]
    assert rows == list(range(vocab_size))
    assert len({share.size + padding for share, padding in parts}) == 1
    # Side by side, padding is behind the vocabulary and nowhere else.
    assert all(share.size == 0 or parts[index - 1][1] == 0 for index, (share, _) in enumerate(parts) if index)


@pytest.mark.parametrize(
    ("changes", "tp_size", "message"),
    [
        ({}, 3, "flag tp_size=3: the model's num_attention_heads is 4, which 3 ranks cannot share.*use 1, 2 or 4"),
        ({"intermediate_size": 98}, 4, "intermediate_size is 98, which 4 ranks cannot share equally; use 1 or 2"),
        ({"heads": 12, "kv_heads": 6}, 4, "num_key_value_heads is 6, neither a multiple of 4 nor a divisor"),
        ({"heads": 5, "kv_heads": 1, "intermediate_size": 7}, 5, "cannot share equally; use 1$"),
    ],
)
def test_what_ranks_cannot_share_is_refused(changes, tp_size, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        refuse_unshareable(small_config(**changes), tp_size)
    assert refused.value.field == "tp_size"


@given(st.integers(0, 1), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_a_slice_takes_its_part_of_the_whole_tensor(dimension, before, size, behind):
    whole = before + size + behind
    tensor = torch.arange(whole * 3).view((whole, 3) if dimension == 0 else (3, whole))
    run = slice(before, before + size)
    expected = tensor[run] if dimension == 0 else tensor[:, run]
    for fill in (SliceTarget.copy_, lambda target, source: target.read(source)):
        part = torch.full(expected.shape, -1)
        target = SliceTarget(part, dimension, RankShare(before, size, whole))
        assert target.shape == tensor.shape
        fill(target, tensor)
        assert torch.equal(part, expected)


def test_a_slice_for_a_target_of_another_size_is_a_mistake():
    with pytest.raises(ValueError, match="a target of shape \\[4, 3\\] for 5 elements of dimension 0"):
        SliceTarget(torch.empty(4, 3), 0, RankShare(0, 5, 10))


def test_slices_of_all_ranks_are_the_whole_checkpoint():
    """Side by side, and with key heads that several ranks have."""
    config, ranks = small_config(heads=8, kv_heads=2, intermediate_size=96, vocab_size=70), everyone(4)
    width, kv_width = 8 * 16, 2 * 16
    whole = {
        "a.q_proj.weight": (width, 64),
        "a.k_proj.weight": (kv_width, 64),
        "a.v_proj.bias": (kv_width,),
        "a.o_proj.weight": (64, width),
        "a.o_proj.bias": (64,),
        "a.up_proj.weight": (96, 64),
        "a.down_proj.weight": (64, 96),
        "model.norm.weight": (64,),
        "lm_head.weight": (70, 64),
    }
    tensors = {name: torch.randn(shape) for name, shape in whole.items()}
    seen = {name: [] for name in whole}
    for each in ranks:
        local, rows = local_config(config, each, range(1)), vocabulary_of(config, each)[0].size
        sizes = {width: local.heads * 16, kv_width: local.kv_heads * 16, 96: local.intermediate_size, 70: rows}
        here = {name: torch.empty([sizes.get(size, size) for size in shape]) for name, shape in whole.items()}
        for name, target in slice_targets(here, config, each).items():
            assert target.shape == whole[name]
            target.copy_(tensors[name])
            seen[name].append(here[name])
    for name, parts in seen.items():
        if tensors[name].shape == parts[0].shape:
            joined = parts[0]
        else:
            joined = torch.cat(parts[::2] if "k_proj" in name or "v_proj" in name else parts, dim=_split(name))
        assert torch.equal(joined, tensors[name]), name


def _split(name: str) -> int:
    return 1 if "o_proj" in name or "down_proj" in name else 0


@given(st.integers(1, 90), st.data(), st.floats(0, 20))
def test_no_other_counts_give_a_faster_slowest_stage(layers, data, head):
    stages = data.draw(st.integers(1, min(layers, 12)))
    counts = balanced(layers, stages, head)
    assert len(counts) == stages
    assert sum(counts) == layers
    assert min(counts) >= 1
    slowest = max(*counts[:-1], counts[-1] + head) if stages > 1 else layers + head
    other = data.draw(st.lists(st.integers(1, layers), min_size=stages - 1, max_size=stages - 1, unique=True))
    cuts = [0, *sorted(cut for cut in other if cut < layers), layers]
    if len(cuts) == stages + 1:
        others = np.diff(cuts).tolist()
        assert slowest <= max(*others[:-1], others[-1] + head, 0) + 1e-9
    assert max(counts[:-1], default=0) - min(counts[:-1], default=0) <= 1


def test_the_head_counts_as_so_many_layers():
    # Qwen2.5-0.5B: a head of 136 million parameters, layers of 15 million each.
    config = small_config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, layers=24, heads=14, kv_heads=2, head_dim=64
    )
    assert head_cost(config) == pytest.approx(9.1, abs=0.1)
    assert [len(stage) for stage in layers_of(config, 2)] == [17, 7]
    assert [len(stage) for stage in layers_of(config, 4)] == [7, 8, 8, 1]


def test_a_layer_of_experts_costs_those_that_a_token_passes():
    """The sizes are those of gpt-oss-20b."""
    sizes = {"vocab_size": 201088, "hidden_size": 2880, "layers": 24, "heads": 64, "kv_heads": 8, "head_dim": 64}
    config = small_config(mlp=ExpertsConfig(count=32, chosen=4, width=2880), **sizes)
    assert head_cost(config) == pytest.approx(201088 / (2 * 72 * 64 + 4 * 3 * 2880), rel=0.01)
    assert [len(stage) for stage in layers_of(config, 2)] == [14, 10]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_stages_follow_one_another(counts):
    stages = layers_of(small_config(layers=sum(counts)), len(counts), counts)
    assert [len(stage) for stage in stages] == counts
    assert [stage.stop for stage in stages] == list(accumulate(counts))
    assert [layer for stage in stages for layer in stage] == list(range(sum(counts)))


@pytest.mark.parametrize(
    ("stages", "counts", "message", "field"),
    [
        (4, (), "flag pp_size=4: the model has 3 layers, and every stage needs one", "pp_size"),
        (2, (1, 1), "flag pp_layers=1,1: 2 layers in all, and the model has 3", "pp_layers"),
    ],
)
def test_stages_that_the_layers_do_not_give_are_refused(stages, counts, message, field):
    with pytest.raises(InvalidRequest, match=message) as refused:
        layers_of(small_config(), stages, counts)
    assert refused.value.field == field
