"""Mixtures of experts whose weights are integers with scales for groups of inputs, computed by plain torch."""

from functools import partial

import pytest
import torch

from services.worker.described.layer import ExpertsConfig, RouterConfig
from services.worker.layers.fp8 import copy_rows
from services.worker.layers.grouped import GroupedLinear
from services.worker.models.decoder import DecoderModel
from services.worker.models.experts import Experts
from tests.worker.small_models import one_sequence, small_config, small_model

EXPERTS = ExpertsConfig(count=4, chosen=2, width=96, router=RouterConfig(bias=True), expert_bias=True, shared_width=64)


def models(bits: int, offsets: bool) -> tuple[DecoderModel, DecoderModel]:
    """Return a model of integers, and one whose weights are the same values in float32."""
    config = small_config(layers=2, mlp=EXPERTS, tied_embeddings=False)
    model = small_model(config, linear=partial(GroupedLinear, bits=bits, offsets=offsets))
    for module in model.modules():
        if isinstance(module, Experts) and offsets:
            for scale in (module.gate_up_scale, module.down_matrix_scale):
                scale[:, 1].normal_(0, 0.01, generator=torch.Generator().manual_seed(1))
    same = small_model(config)
    targets = same.targets()
    for name, target in model.targets().items():
        values = torch.zeros(target.shape)
        copy_rows(target, values)
        targets[name].copy_(values)
    return model, same


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offsets", [False, True])
def test_a_model_of_integers_gives_what_a_model_of_their_values_gives(bits, offsets):
    model, same = models(bits, offsets)
    token_ids = torch.arange(9) * 31 % 320
    with torch.inference_mode():
        found, expected = (
            each.project(each(token_ids, torch.arange(9), one_sequence(each.config, 9)[1])) for each in (model, same)
        )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("bits", "codes"), [(4, 32), (8, 64)])
@pytest.mark.parametrize("offsets", [False, True])
def test_experts_take_the_memory_of_integers(bits, codes, offsets):
    [experts] = [each for each in models(bits, offsets)[0].layers[0].modules() if isinstance(each, Experts)]
    assert (experts.gate_up.shape, experts.gate_up.dtype) == ((4, 2 * 96, codes), torch.uint8)
    assert experts.gate_up_scale.shape == (4, 1 + offsets, 1, 2 * 96)  # a group of all 64 inputs
    assert experts.down_matrix.shape == (4, 64, codes * 96 // 64)
    assert experts.down_matrix_scale.shape == (4, 1 + offsets, 3, 64)  # groups of 32


def test_experts_of_integers_are_near_those_that_they_are_made_of():
    config = small_config(layers=1, mlp=EXPERTS)
    model, exact = small_model(config, linear=partial(GroupedLinear, bits=8)), small_model(config)
    for name, target in exact.targets().items():
        if "experts" in name and name.endswith("proj.weight"):
            values = torch.zeros(target.shape)
            copy_rows(model.targets()[name], values)
            assert 0 < (values - target).abs().max() <= target.abs().max() / 250, name
