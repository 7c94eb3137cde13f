"""Checkpoints store every element of a model once, in any order that a family has."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.worker.described.checkpoint import checkpoint_tensors, model_shapes
from services.worker.described.config import ModelConfig
from services.worker.described.heads import laid_out, query_order, value_order
from services.worker.described.registry import ARCHITECTURES, read_model_config
from services.worker.models.load_targets import PartTargets
from tests.properties import examples
from tests.worker.small_models import small_config

PADDING = -1
DEVICES = st.sampled_from(["cpu", "cuda"])
of_architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


@st.composite
def heads(draw) -> ModelConfig:
    """Return a model whose heads have any even size, of which any even number of elements turns, for any device."""
    size = 2 * draw(st.integers(1, 128))
    rotated = 2 * draw(st.integers(1, size // 2))
    return laid_out(small_config(head_dim=size, head_unrotated=size - rotated), draw(DEVICES))


@given(heads())
def test_each_element_of_a_head_has_one_position(model):
    padding = [PADDING] * model.head_padding
    for order in (query_order(model), value_order(model)):
        assert sorted(order) == [*padding, *range(model.stored_head_dim)]
        assert len(order) == model.head_dim


@given(heads())
def test_elements_that_turn_together_are_half_a_head_apart(model):
    order, half, pairs = query_order(model), model.head_dim // 2, model.rotated_dim // 2
    assert order[:pairs] == list(range(pairs))
    assert order[half : half + pairs] == list(range(pairs, 2 * pairs))


@given(heads())
def test_heads_on_gpus_have_a_power_of_two_of_elements(model):
    laid = laid_out(model, "cuda")
    assert laid.stored_head_dim == model.stored_head_dim
    assert laid.rotated_dim == model.rotated_dim
    assert laid.head_dim >= 16
    assert laid.head_dim & (laid.head_dim - 1) == 0
    assert laid.head_dim < 2 * max(9, model.stored_head_dim)


@st.composite
def models(draw, architecture: str) -> ModelConfig:
    """Return a small model of ``architecture``."""
    kv_heads, experts = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    sizes = {
        "architectures": [architecture],
        "vocab_size": draw(st.integers(1, 20)),
        "hidden_size": draw(st.integers(1, 20)),
        "intermediate_size": draw(st.integers(1, 20)),
        "moe_intermediate_size": draw(st.integers(1, 20)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "head_dim": 4 * draw(st.integers(1, 5)),
        "max_position_embeddings": 1024,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "num_experts_per_tok": draw(st.integers(1, experts)),
    }
    return read_model_config(sizes | dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), experts))


@of_architectures
@settings(max_examples=examples(40))
@given(data=st.data())
def test_each_element_of_a_checkpoint_is_one_element_of_the_model(architecture, data):
    """Every element has a different number, so an element that is copied twice, or never, is found."""
    model = data.draw(models(architecture))
    targets = {name: torch.full(shape, -1) for name, shape in model_shapes(model).items()}
    count = 0
    for stored in checkpoint_tensors(model).values():
        size = prod(stored.shape)
        PartTargets(stored, targets).copy_(torch.arange(count, count + size).reshape(stored.shape))
        count += size
    found = torch.cat([target.flatten() for target in targets.values()])
    assert torch.equal(found.sort().values, torch.arange(count))


@of_architectures
@settings(max_examples=examples(40))
@given(data=st.data())
def test_each_tensor_of_the_model_is_stored_once(architecture, data):
    model = data.draw(models(architecture))
    names = [part.name for stored in checkpoint_tensors(model).values() for part in stored.parts]
    assert sorted(names) == sorted(model_shapes(model))
