"""toka-doctor on quantized checkpoints: format, bytes on disk and in memory, and what is wrong with their files."""

import shutil

import pytest

from services.cli.doctor.findings import Level
from tests import quantized_files as files
from tests.checkpoints import make_checkpoint
from tests.cli.looking import findings, only

GIB = 80  # memory of a GPU
SETTINGS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The directories of a quantized checkpoint, and of one with its values."""
    place = tmp_path_factory.mktemp("quantized")
    source = make_checkpoint(place / "source", "llama", hidden_size=128, intermediate_size=256)
    return files.write_quantized(source, place / "model", files.gptq(32), SETTINGS)


@pytest.fixture
def directory(quantized, tmp_path):
    """A copy of the quantized checkpoint."""
    return shutil.copytree(quantized[0], tmp_path / "model")


def test_a_checkpoint_has_its_format_and_its_bytes(quantized):
    directory, exact = quantized
    found, plain = only("weights", directory), only("weights", exact)
    assert found.level is Level.OK
    assert found.text.endswith("complete, gptq with INT4 in groups of 32, F32")
    assert found.facts["bytes"] == (directory / "model.safetensors").stat().st_size < plain.facts["bytes"]
    facts = [
        [
            each.facts["weights_bytes"]
            for each in findings("memory", place, device="cpu")
            if "weights_bytes" in each.facts
        ]
        for place in quantized
    ]
    assert facts[0] == facts[1] != []


def test_weights_that_stay_quantized_take_fewer_bytes(quantized):
    directory, exact = quantized
    chosen = only("quantization", directory, GIB)
    assert chosen.text == "quantization=checkpoint: weights stay INT4 in groups of 32"
    assert "quantization=checkpoint" in only("settings", directory, GIB).text
    sizes = [
        only("memory", place, GIB, **flags).facts["weights_bytes"]
        for place, flags in ((directory, {}), (directory, {"quantization": "none"}), (exact, {}))
    ]
    assert sizes[0] < sizes[1] == sizes[2]
    assert only("quantization", directory, device="cpu").text.endswith("are converted to dtype on CPUs")
    assert findings("quantization", exact, device="cpu") == []


def test_weights_in_act_order_stay_quantized_on_one_rank(directory):
    files.change_config(directory, quantization_config=SETTINGS | {"desc_act": True})
    assert only("quantization", directory, GIB).text == "quantization=checkpoint: weights stay INT4 in groups of 32"
    assert only("quantization", directory, GIB, tp_size="2").text.endswith(
        "inputs that share a scale are not neighbours (act-order), so ranks cannot have shares of them"
    )


def test_weights_that_cannot_stay_quantized_are_refused(quantized):
    directory, exact = quantized
    flags = {"device": "cpu", "quantization": "checkpoint"}
    found, plain = only("flags", directory, **flags), only("flags", exact, **flags)
    assert found.level is plain.level is Level.FAIL
    assert found.text.startswith("flag quantization=checkpoint: the checkpoint's weights (INT4 in groups of 32) are")
    assert plain.text == "flag quantization=checkpoint: the layers of the checkpoint are not quantized"
    assert found.fix == plain.fix == "use quantization=auto or none"


def test_a_part_that_is_missing_is_named(directory):
    files.change_tensors(directory, **{"model.layers.1.mlp.up_proj.qzeros": None})
    found = only("weights", directory)
    assert found.level is Level.FAIL
    assert "model.layers.1.mlp.up_proj.qzeros is missing, with which" in found.text


def test_a_weight_of_another_shape_is_named(directory):
    files.change_config(directory, intermediate_size=192)
    found = findings("weights", directory)[0]
    assert found.level is Level.FAIL
    assert "proj.weight has shape" in found.text


def test_a_method_that_is_not_supported_is_refused_with_what_to_choose_instead(directory):
    files.change_config(directory, quantization_config={"quant_method": "hqq"})
    found = only("weights", directory)
    assert found.level is Level.FAIL
    assert found.text == "config.json: quantization_config.quant_method='hqq' is not supported"
    assert found.fix.startswith("expected one of fp8, compressed-tensors, gptq, awq, mxfp4: choose another checkpoint")


def test_an_unknown_part_of_a_scheme_is_named(directory):
    files.change_config(directory, quantization_config=SETTINGS | {"checkpoint_format": "marlin"})
    found = only("weights", directory)
    assert found.level is Level.FAIL
    assert "quantization_config.checkpoint_format='marlin' is not supported" in found.text
    assert found.fix.startswith("expected 'gptq' or 'gptq_v2'")
