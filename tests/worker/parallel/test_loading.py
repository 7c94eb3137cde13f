"""Each rank reads its part of a checkpoint and nothing else."""

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors
import torch

from bench.server import free_port
from services.common.errors import InvalidRequest
from services.common.model.json_object import read_json
from services.worker.described.ranks import Ranks
from services.worker.described.registry import read_model_config
from services.worker.described.shares import local_config
from services.worker.described.stages import layers_of
from services.worker.layers.factory import make_linear
from services.worker.layers.fp8 import copy_rows, quantize_rows
from services.worker.layers.kernels import TorchKernels
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel
from services.worker.parallel.errors import ParallelError
from tests.worker.parallel import jobs

CPU = torch.device("cpu")
GRIDS = [(2, 1), (1, 3), (2, 2), (4, 1)]


def start_in(ranks: Ranks, port: int, folders: list[Path]) -> str:
    """A job: start on a host where the model is in the folder of this rank. Return the reason why this fails."""
    before = Path.cwd()
    os.chdir(folders[ranks.index])
    try:
        jobs.start(ranks, port, Path("model"), {}, 10**6)
    except (InvalidRequest, ParallelError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.chdir(before)
    jobs.stop(ranks)
    return ""


def test_hosts_with_two_revisions_of_a_model_do_not_start(checkpoint, pool, tmp_path):
    """All have it at the same path."""
    folders = [tmp_path / str(rank) for rank in range(2)]
    for rank, folder in enumerate(folders):
        shutil.copytree(checkpoint(seed=rank), folder / "model")
    first, second = pool.run(start_in, 1, 2, free_port(), folders)
    assert first.startswith("ParallelError: the replica cannot start; rank tp_rank=0 pp_rank=1: flag model=model: its")
    assert second.startswith("InvalidRequest: flag model=model: its files here are not those of the first worker")


def model_of(directory, ranks: Ranks, quantization: str = "none") -> DecoderModel:
    config = read_model_config(read_json(directory / "config.json"))
    layers = layers_of(config, ranks.pp_size)[ranks.pp_rank]
    local = local_config(config, ranks, layers)
    linear = make_linear(local, torch.float32, CPU, quantization, ranks.tp_size)
    return DecoderModel(config, torch.float32, CPU, TorchKernels(), linear, ranks=ranks, layers=layers)


def load(directory, ranks: Ranks, quantization: str = "none") -> DecoderModel:
    model = model_of(directory, ranks, quantization)
    weights.load(directory, model.targets(), model.config)
    return model


def grid(tp_size: int, pp_size: int) -> list[Ranks]:
    return [Ranks(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]


@pytest.fixture
def read(monkeypatch) -> dict[str, int]:
    """Elements of each tensor that were read so far."""
    found: dict[str, int] = {}

    class Sliced:
        def __init__(self, name, stored):
            self._name, self._stored = name, stored

        def get_shape(self):
            return self._stored.get_shape()

        def __getitem__(self, index):
            part = self._stored[index]
            found[self._name] = found.get(self._name, 0) + part.numel()
            return part

    class Opened:
        def __init__(self, *arguments, **options):
            self.opened = original(*arguments, **options)

        def __enter__(self):
            self.opened.__enter__()
            return self

        def __exit__(self, *error):
            return self.opened.__exit__(*error)

        def keys(self):
            return self.opened.keys()

        def get_slice(self, name):
            return Sliced(name, self.opened.get_slice(name))

        def get_tensor(self, name):
            tensor = self.opened.get_tensor(name)
            found[name] = found.get(name, 0) + tensor.numel()
            return tensor

    original = safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Opened)
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp_size", "pp_size"), GRIDS)
def test_all_ranks_together_read_every_matrix_once(tp_size, pp_size, tied, checkpoint, read):
    """Vectors that all add or multiply with are read by all; the key heads are as many as ranks, or more."""
    directory = checkpoint("llama", tied=tied, attention_bias=True, mlp_bias=True, num_key_value_heads=4)
    sizes = {}
    with safetensors.safe_open(directory / "model.safetensors", framework="pt").opened as stored:
        sizes |= {name: stored.get_tensor(name).numel() for name in stored.keys()}  # noqa: SIM118
    for ranks in grid(tp_size, pp_size):
        load(directory, ranks)
    for name, size in sizes.items():
        times = tp_size if "norm" in name else 1
        if name == "model.embed_tokens.weight" and tied and pp_size > 1:
            times = 2  # the last stage's head
        assert read[name] == times * size, name


def test_a_stage_in_the_middle_reads_its_own_layers_and_nothing_else(checkpoint, read):
    load(checkpoint("llama"), Ranks(pp_rank=1, pp_size=3))
    assert {name.split(".")[1] for name in read} == {"layers"}
    assert {name.split(".")[2] for name in read} == {"1"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("pp_size", [1, 2])
def test_quantized_parts_are_scaled_by_their_own_rows(pp_size, tied, checkpoint):
    directory = checkpoint("llama", tied=tied)
    (whole,) = [load(directory, ranks) for ranks in grid(1, 1)]
    for ranks in grid(2, pp_size):
        model = load(directory, ranks, "fp8")
        layer, exact = model.layers[0], whole.layers[model.layer_range.start]
        half = slice(80 * ranks.tp_rank, 80 * ranks.tp_rank + 80)
        rows, scale = quantize_rows(exact.mlp.down.weight.t()[:, half])
        assert torch.equal(layer.mlp.down.weight.float(), rows.float())
        assert torch.equal(layer.mlp.down.scale.t(), scale)
        if model.last:
            head = (whole.embedding if tied else whole.head.weight.t())[208 * ranks.tp_rank :][:208]
            rows, scale = quantize_rows(head)
            assert torch.equal(model.head.weight[: len(head)].float(), rows.float())
            assert (model.head.weight[len(head) :].float() == 0).all()
            assert (model.embedding is None) == (not model.first)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp_size", "pp_size"), GRIDS)
def test_dummy_weights_are_the_same_numbers_on_any_ranks(tp_size, pp_size, tied, checkpoint):
    directory = checkpoint("llama", tied=tied, attention_bias=True)
    whole = model_of(directory, Ranks())
    weights.load_dummy(whole, seed=3)
    wanted = whole.targets()
    for ranks in grid(tp_size, pp_size):
        model = model_of(directory, ranks)
        weights.load_dummy(model, seed=3)
        for name, target in model.targets().items():
            if isinstance(target, torch.Tensor):
                assert torch.equal(target, wanted[name]), name
            else:
                part = target.target.clone()
                target.copy_(wanted[name])
                assert torch.equal(target.target, part), name


def changed(directory, tmp_path, **changes):
    target = tmp_path / "changed"
    shutil.copytree(directory, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize("ranks", grid(2, 2), ids=lambda ranks: ranks.name())
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, r"9 tensors have no place in this architecture, e.g. model.layers.2.input_layer"),
        ({"vocab_size": 384}, r"(embed_tokens|lm_head).weight has shape \[400, 64\], config.json asks for \[384, 64\]"),
        ({"intermediate_size": 96}, r"down_proj.weight has shape \[64, 160\], config.json asks for \[64, 96\]"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_on_every_rank(ranks, changes, message, checkpoint, tmp_path):
    with pytest.raises(InvalidRequest, match=message):
        load(changed(checkpoint(), tmp_path, **changes), ranks)


@pytest.mark.parametrize(("pp_rank", "missing"), [(0, None), (1, "model.layers.3.input_layer")])
def test_a_missing_layer_is_missed_by_its_own_stage(pp_rank, missing, checkpoint, tmp_path):
    directory, ranks = changed(checkpoint(), tmp_path, num_hidden_layers=4), Ranks(pp_rank=pp_rank, pp_size=2)
    if missing is None:
        load(directory, ranks)
        return
    with pytest.raises(InvalidRequest, match=f"9 tensors that config.json asks for are missing, e.g. {missing}"):
        load(directory, ranks)


@pytest.mark.parametrize("whole", [False, True])
def test_ranks_have_the_integers_of_their_experts_or_of_their_share_of_each(whole, checkpoint):
    directory = checkpoint("qwen3_moe", moe_intermediate_size=64)
    expected = load(directory, Ranks(), "int8").targets()
    counts = dict.fromkeys((name for name in expected if ".experts." in name), 0)
    for rank in range(2):
        targets = load(directory, Ranks(rank, 2, whole_experts=whole), "int8").targets()
        for name in counts.keys() & targets.keys():
            values, theirs = (torch.full(targets[name].shape, torch.nan) for _ in range(2))
            copy_rows(targets[name], values)
            copy_rows(expected[name], theirs)
            held = ~values.isnan()
            assert torch.equal(values[held], theirs[held])
            counts[name] += int(held.sum())
    assert counts == {name: expected[name].shape.numel() for name in counts}
