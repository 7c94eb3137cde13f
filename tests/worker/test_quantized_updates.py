"""New weights for a worker that was started from a quantized checkpoint, and quantized ones for any worker."""

import shutil

import grpc
import pytest

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.worker.boot.common import boot
from tests import quantized_files as files
from tests.worker.scheduler import status_of
from tests.worker.test_quantized_checkpoints import BLOCKS, EXPERTS, SIZES, gptq
from tests.worker.test_sleep import check_weights_are_read_again
from tests.worker.test_weights import FLAGS, checksums, commit, generated, stage, weights_of


@pytest.fixture(scope="session")
def models(checkpoint, tmp_path_factory):
    """By their kind, the directories of a quantized model, of one with its values, and of new weights."""
    place = tmp_path_factory.mktemp("quantized")
    kinds = {
        "gptq": ("llama", files.gptq(32), gptq(32), None),
        "fp8": ("qwen3_moe", files.fp8(16, 32), BLOCKS, None),
        "mxfp4": ("gpt_oss", files.mxfp4, {"quant_method": "mxfp4"}, EXPERTS),
    }
    made = {}
    for kind, (architecture, store, settings, chosen) in kinds.items():
        others = {} if chosen is None else {"chosen": chosen}
        source = checkpoint(architecture, **SIZES)
        directory, exact = files.write_quantized(source, place / kind, store, settings, **others)
        made[kind] = directory, exact, checkpoint(architecture, seed=1, **SIZES)
    return made


@pytest.mark.parametrize("kind", [pytest.param("gptq", marks=pytest.mark.slow), "fp8", "mxfp4"])
def test_a_quantized_model_takes_weights_that_are_not(models, kind):
    directory, _, new = models[kind]
    running, fresh = (boot(WorkerConfig(model=str(each), **FLAGS)) for each in (directory, new))
    weights = weights_of(running, new.parent)
    assert generated(running) != (expected := generated(fresh))
    weights.stage("u", "1", str(new))
    weights.commit("u")
    assert generated(running) == expected
    assert weights.checksums()[1] == weights_of(fresh).checksums()[1]
    running.runner.close()
    fresh.runner.close()


@pytest.mark.parametrize("kind", ["gptq", "fp8", "mxfp4"])
async def test_quantized_weights_of_an_update_are_refused(models, worker, connect, kind):
    directory, exact, _ = models[kind]
    scheduler = await connect(await worker(model=str(exact), weight_directories=(str(directory.parent),)))
    await scheduler.info()  # waits for the model
    before = await checksums(scheduler)
    code, details = await status_of(stage(scheduler, directory))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "config.json has quantization_config.quant_method=" in details
    assert "weights of an update must not be quantized" in details
    assert (await status_of(commit(scheduler)))[0] is grpc.StatusCode.FAILED_PRECONDITION
    assert await checksums(scheduler) == before


async def test_parts_of_quantized_weights_without_settings_are_refused(models, worker, connect, tmp_path):
    directory, exact, _ = models["gptq"]
    bare = shutil.copytree(directory, tmp_path / "bare")
    files.change_config(bare, quantization_config=None)
    scheduler = await connect(await worker(model=str(exact), weight_directories=(str(tmp_path),)))
    await scheduler.info()  # waits for the model
    code, details = await status_of(stage(scheduler, bare))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "missing" in details


@pytest.mark.parametrize(("kind", "flags"), [("gptq", {}), ("fp8", {"quantization": "fp8"}), ("mxfp4", {})])
def test_dropped_weights_are_read_again(models, kind, flags):
    booted = boot(WorkerConfig(model=str(models[kind][0]), **FLAGS | flags))
    check_weights_are_read_again(booted)


@pytest.mark.parametrize("place", [0, 1])
def test_weights_that_cannot_stay_quantized_are_refused_at_the_start(models, place):
    """On a CPU, and where the checkpoint is not quantized."""
    reason = (
        "the checkpoint's weights .* are converted to dtype on CPUs",
        "the layers of the checkpoint are not quantized",
    )
    with pytest.raises(InvalidRequest, match=f"flag quantization=checkpoint: {reason[place]}") as caught:
        boot(WorkerConfig(model=str(models["gptq"][place]), quantization="checkpoint", **FLAGS))
    assert caught.value.field == "quantization"


HOSTILE = {
    "model.layers.0.mlp.up_proj.g_idx": (lambda part: part.fill_(9), "has the groups 9 to 9 in its order of columns"),
    "model.layers.1.mlp.up_proj.g_idx": (lambda part: part.sub_(2), "has the groups -2 to 1"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_an_order_of_groups_that_are_absent_is_refused(models, name, tmp_path):
    change, message = HOSTILE[name]
    directory = shutil.copytree(models["gptq"][0], tmp_path / "model")
    tensors = files.load_file(directory / "model.safetensors")
    files.change_tensors(directory, **{name: change(tensors[name])})
    with pytest.raises(InvalidRequest, match=message):
        boot(WorkerConfig(model=str(directory), **FLAGS))


def test_packed_weights_have_the_shape_that_they_say(checkpoint, tmp_path):
    settings = files.compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32})
    source = checkpoint("llama", **SIZES)
    directory, _ = files.write_quantized(source, tmp_path / "model", files.pack_quantized(32), settings)
    name = "model.layers.0.mlp.up_proj.weight_shape"
    tensors = files.load_file(directory / "model.safetensors")
    files.change_tensors(directory, **{name: tensors[name] - 1})
    with pytest.raises(
        InvalidRequest, match=r"up_proj\.weight has weight_shape=\[255, 127\], and its values \[256, 128\]"
    ):
        boot(WorkerConfig(model=str(directory), **FLAGS))
