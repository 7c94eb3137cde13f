"""Quantized weights whose inputs of a group are not neighbours (act-order), by the reference forms on a CPU."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.common.errors import InvalidRequest
from services.worker.arena.tensor_arena import TensorArena
from services.worker.described.ranks import Ranks
from services.worker.layers.fp8 import copy_rows
from services.worker.models import staging
from tests import quantized_files as files
from tests.worker.small_models import CPU
from tests.worker.test_kept_weights import CASES, config_of, directories, loaded, made_for, values_of

__all__ = ["directories"]

CASE = CASES["gptq-32-order"][0]
LAYER = "model.layers.1"


@pytest.mark.parametrize("reverse", [False, True])
def test_the_parts_of_a_layer_may_be_read_in_any_order(reverse, directories, tmp_path):
    directory, _ = directories(CASE)
    changed = shutil.copytree(directory, tmp_path / "m")
    tensors = load_file(directory / "model.safetensors")
    (changed / "model.safetensors").unlink()
    modules = sorted({name.rpartition(".")[0] for name in tensors}, reverse=reverse)
    index = {}
    for number, module in enumerate(modules):
        own = {name: each.contiguous() for name, each in tensors.items() if name.rpartition(".")[0] == module}
        save_file(own, changed / f"model-{number:05}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(own, f"model-{number:05}.safetensors")
    (changed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    found = values_of(loaded(changed))
    for key, tensor in values_of(loaded(directory)).items():
        assert torch.equal(tensor, found[key]), key


@pytest.mark.parametrize("module", ["self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.up_proj"])
def test_parts_of_a_layer_with_different_orders_are_refused_with_what_to_do(module, directories, tmp_path):
    changed = shutil.copytree(directories(CASE)[0], tmp_path / "m")
    name = f"{LAYER}.{module}.g_idx"
    order = load_file(changed / "model.safetensors")[name]
    files.change_tensors(changed, **{name: order.roll(1)})
    with pytest.raises(
        InvalidRequest,
        match=rf"{LAYER}\..*_proj\.weight cannot stay quantized: its order of inputs \(g_idx\) differs from that of"
        r" another part of the same layer; use quantization=none",
    ) as caught:
        loaded(changed)
    assert caught.value.field == "quantization"
    loaded(changed, kept=False)


def test_a_plain_part_has_the_order_of_the_parts_before_it_and_does_not_lose_it(directories):
    """A start may load a layer of which one part is plain and the others are quantized."""
    directory, exact = directories(CASE)
    query, key = (f"{LAYER}.self_attn.{each}.weight" for each in ("q_proj", "k_proj"))
    model = made_for(config_of(directory), Ranks(), kept=True)
    plain, quantized = load_file(exact / "model.safetensors"), staging.stage(directory, model, model.config).tensors
    for later in (False, True):
        targets = made_for(model.config, Ranks(), kept=True).targets()
        if later:
            targets[key].copy_quantized(quantized[key])
        targets[query].copy_(plain[query])
        if not later:
            with pytest.raises(ValueError, match="differs from that of another part"):
                targets[key].copy_quantized(quantized[key])
        copy_rows(targets[query], found := torch.empty(plain[query].shape))
        assert (found - plain[query]).norm() / plain[query].norm() < 0.1


@pytest.mark.parametrize("source", [0, 1], ids=["the files", "plain tensors"])
def test_an_order_is_there_after_a_sleep_that_dropped_the_weights(source, directories):
    """New weights have no order of inputs. The parts of a layer come in any order."""
    places = directories(CASE)
    model = loaded(places[0])
    expected = values_of(model)
    arena = TensorArena(CPU)
    arena.adopt(model.state_dict(keep_vars=True).values())
    orders = [each.clone() for name, each in model.named_buffers() if name.endswith(".order")]
    assert len(orders) == 8
    arena.release()
    arena.restore()
    staged = staging.stage(places[source], model, model.config)
    staging.apply(staged._replace(tensors=dict(reversed(staged.tensors.items()))), model)
    for key, tensor in values_of(model).items():
        assert (tensor - expected[key]).norm() / expected[key].norm() < (0.1 if source else 1e-6), key
    for name, order in model.named_buffers():
        if name.endswith(".order"):
            assert torch.equal(order, orders.pop(0))


def test_an_update_with_different_orders_changes_nothing(directories, tmp_path):
    directory, _ = directories(CASE)
    model, changed = loaded(directory), shutil.copytree(directory, tmp_path / "m")
    before = values_of(model)
    name = f"{LAYER}.mlp.up_proj.g_idx"
    files.change_tensors(changed, **{name: load_file(changed / "model.safetensors")[name].roll(1)})
    staged = staging.stage(changed, model, model.config)
    with pytest.raises(InvalidRequest, match=r"its order of inputs .* differs from that of another part"):
        staging.apply(staged, model)
    for key, tensor in values_of(model).items():
        assert torch.equal(tensor, before[key]), key
