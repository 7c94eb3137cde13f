"""toka-doctor: what it finds is what a start would meet."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.model import SHAPES
from services.cli.doctor.command import main
from services.cli.doctor.findings import Finding, Level
from services.cli.doctor.model import find
from services.common.config import DeploymentConfig
from services.common.errors import InvalidRequest
from services.common.flags import build
from services.common.model.files import BUILTIN
from services.common.model.json_object import read_json
from services.worker.described.registry import read_model_config
from services.worker.layers.factory import make_kernels
from services.worker.models import weights
from services.worker.models.decoder import DecoderModel
from tests.cli.looking import findings, only
from tests.cli.running import run
from tests.foreign_models import make_foreign_checkpoint
from tests.worker.small_models import CPU

INDEX = "model.safetensors.index.json"
# Those of Hugging Face's config.json, as far as they count.
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "eos_token_id": 128009,
}  # fmt: skip
LLAMA_8B = LLAMA_1B | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "head_dim": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command. What of ``environment`` is lower case is of the fake driver."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
    clean |= {name if name.isupper() else f"FAKE_{name.upper()}": value for name, value in environment.items()}
    command = [sys.executable, "-m", "services.cli.doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=clean, check=False)


@pytest.fixture
def folder(tmp_path) -> Path:
    """The built-in model, in two files with an index."""
    target = tmp_path / "model"
    shutil.copytree(BUILTIN, target, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    tensors = load_file(BUILTIN / "model.safetensors")
    names = sorted(tensors)
    placed = {name: f"part-{1 + (index % 2)}.safetensors" for index, name in enumerate(names)}
    for file in set(placed.values()):
        save_file({name: tensors[name] for name in names if placed[name] == file}, target / file)
    (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return target


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_builtin_model_can_be_started():
    answer = doctor("--json", "port=0", "grpc_port=0", "device=cpu")
    told = json.loads(answer.stdout)
    assert answer.returncode == 0, answer.stdout
    assert told["ok"]
    levels = {each["subject"]: each["level"] for each in told["findings"]}
    assert levels["weights"] == levels["tokenizer"] == levels["memory"] == levels["model"] == "ok"
    [memory] = [each for each in told["findings"] if each["subject"] == "memory"]
    stored = (BUILTIN / "model.safetensors").stat().st_size  # in two bytes each
    assert memory["facts"]["weights_bytes"] == pytest.approx(2 * stored, rel=0.01)
    assert "64 sequences of 2,048 tokens" in memory["text"]


def test_nothing_of_torch_is_loaded():
    program = (
        "import sys; from services.cli.doctor.command import main; from tests.cli.running import run;"
        "done = run(main, 'port=0', 'grpc_port=0', 'device=cpu'); print(done.output);"
        "assert done.status == 0; assert not {'torch', 'triton', 'flashinfer', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_whole_folder_is_whole(folder):
    found = only("weights", folder)
    assert found.level is Level.OK
    assert found.text.startswith("2 files")


def truncate(folder: Path) -> None:
    path = folder / "part-1.safetensors"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 100)


def store(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Tensors in the place of others; None: it is not there any more, nor in the index."""
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    for name, tensor in tensors.items():
        file = placed.setdefault(name, "part-1.safetensors")
        stored = load_file(folder / file)
        stored.pop(name, None)
        if tensor is None:
            del placed[name]
        else:
            stored[name] = tensor
        save_file(stored, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))


BROKEN = {
    "a missing file": (lambda folder: (folder / "part-2.safetensors").unlink(), "part-2.safetensors does not exist"),
    "a truncated file": (truncate, "it is incomplete"),
    "an index that is cut off": (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a":'), "is no index"),
    "no weights": (lambda folder: [each.unlink() for each in (*folder.glob("part*"), folder / INDEX)],
                   "model.safetensors does not exist"),
    "a file of Git LFS": (
        lambda folder: (folder / "part-1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid"),
        "is a Git LFS pointer",
    ),
    "an empty file": (lambda folder: (folder / "part-1.safetensors").write_bytes(b""), "does not begin with"),
    "noise": (lambda folder: (folder / "part-1.safetensors").write_bytes(b"\xff" * 4096), "does not begin with"),
    "a tensor that is not there": (lambda folder: store(folder, **{"model.norm.weight": None}), "e.g. model.norm"),
    "a tensor of another shape": (
        lambda folder: store(folder, **{"model.norm.weight": torch.ones(7)}), "model.norm.weight has shape [7]"
    ),
    "weights that are quantised": (
        lambda folder: store(folder, **{"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
        "1 tensors have no place in this architecture, e.g. model.layers.0.mlp.up_proj.weight_scale",
    ),
    "another config.json": (
        lambda folder: change_json(folder / "config.json", num_hidden_layers=7), "config.json asks for are missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_weights_that_a_worker_refuses_are_found(what, folder):
    broke, sentence = BROKEN[what]
    broke(folder)
    found = [each for each in findings("weights", folder) if sentence in each.text]
    assert found
    assert found[0].level is Level.FAIL
    assert found[0].fix
    described = read_model_config(read_json(folder / "config.json"))
    model = DecoderModel(described, torch.float32, torch.device("meta"), make_kernels(CPU, torch.float32))
    with pytest.raises(InvalidRequest):
        weights.load(folder, model.targets(), described)


def test_an_index_of_another_version_is_found(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "part-1.safetensors"
    index["weight_map"]["model.layers.0.input_layernorm.weight"] = "part-2.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    found = findings("weights", folder)
    assert {each.level for each in found} == {Level.FAIL}
    assert "but it does not" in found[0].text


def test_weights_of_another_format_are_named(folder):
    for each in (*folder.glob("part*"), folder / INDEX):
        each.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")
    found = only("weights", folder)
    assert "as *.bin only" in found.text
    assert "convert them to safetensors" in found.fix


@pytest.mark.parametrize(
    ("name", "content", "subject", "sentence"),
    [
        ("config.json", None, "model", "config.json does not exist"),
        ("config.json", "{", "model", "is not valid JSON"),
        ("config.json", '{"architectures": ["BertModel"]}', "model", "BertModel cannot run through transformers"),
        ("tokenizer.json", None, "tokenizer", ""),
        ("tokenizer.json", "{}", "tokenizer", ""),
    ],
)
def test_a_broken_text_file_is_found(name, content, subject, sentence, folder):
    (folder / name).unlink() if content is None else (folder / name).write_text(content)
    found = only(subject, folder)
    assert found.level is Level.FAIL
    assert sentence in found.text
    assert found.fix


def test_a_model_without_a_template_or_an_end_is_warned_of(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "chat_template"}))
    (folder / "generation_config.json").unlink()
    change_json(folder / "config.json", eos_token_id=None)
    assert "no chat template" in only("tokenizer", folder).text
    assert "no eos_token_id" in findings("model", folder)[1].text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"tp_size": 4, "device": "cpu"}, "which 4 ranks cannot share equally"),
        ({"pp_size": 7, "device": "cpu"}, "the model has 6 layers, and every stage needs one"),
        ({"max_context_tokens": 4096}, "the model's own limit is 2048"),
    ],
)
def test_flags_that_the_model_does_not_allow_fail(flags, sentence):
    found = only("model", **flags)
    assert found.level is Level.FAIL
    assert sentence in found.text
    assert found.fix


def test_a_model_that_is_not_here_is_told(tmp_path):
    nowhere = only("model", tmp_path / "nowhere")
    assert nowhere.level is Level.FAIL
    assert "is not a directory" in nowhere.text
    _, [hub] = find(build(DeploymentConfig, {"model": "nobody/nothing-of-this-name"}))
    assert hub.level is Level.WARN
    assert "toka-download model=nobody/nothing-of-this-name" in hub.fix


def test_a_taken_port_fails_with_the_flag_that_chooses_another():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = doctor(f"port={port}", "grpc_port=0", "device=cpu", "--quiet")
    assert answer.returncode == 1
    assert re.search(r"fail +ports", answer.stdout)
    assert f"sport = :{port}" in answer.stdout.replace("\n", "")
    assert "port=" in answer.stdout


def test_a_finding_is_a_line_and_no_port_is_called_free_that_is_not():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        answer = doctor(f"port={taken.getsockname()[1]}", "grpc_port=0", "device=cpu", COLUMNS="40")
    lines = answer.stdout.splitlines()
    [ports] = [number for number, line in enumerate(lines) if line[8:].startswith("ports ")]
    assert lines[ports].startswith("fail")
    assert "another with port=" in lines[ports + 1]


@pytest.mark.parametrize(
    ("flags", "gib", "sentence"),
    [
        ({"use_cudagraphs": True}, None, "flag use_cudagraphs=T: only on cuda"),
        ({"kv_cache_dtype": "fp8"}, None, "flag kv_cache_dtype=fp8: only on cuda"),
        ({"page_size": 24}, 80, "flag page_size=24: on cuda it must be a power of two"),
    ],
)
def test_a_flag_that_the_device_has_not_fails_as_the_start_does(flags, gib, sentence, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = only("flags", "builtin", gib, **flags)
    assert found.level is Level.FAIL
    assert sentence in found.text
    assert found.fix


def test_shared_prefixes_on_a_cpu_are_a_warning(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = only("flags", use_hydragen=True)
    assert found.level is Level.WARN
    assert "flag use_hydragen=T: has no effect" in found.text


def test_heads_that_cuda_has_no_kernels_for_fail(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"head_dim": 80}))
    assert findings("flags", tmp_path, 80, load_format="dummy") == []
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"head_dim": 320}))
    found = only("flags", tmp_path, 80, load_format="dummy")
    assert "head_dim=320 is not supported on cuda, where heads have at most 256 elements" in found.text
    assert "device=cpu" in found.fix


def test_the_cache_of_padded_heads_is_planned_as_on_the_gpu(tmp_path):
    found = planned(tmp_path, LLAMA_1B | {"head_dim": 80, "max_position_embeddings": 4096}, 80)
    assert found.facts["bytes_per_token"] == 2 * 16 * 8 * 128 * 2 + 4


@pytest.mark.slow
def test_ranks_of_a_mixture_hold_their_shares_of_the_experts(tmp_path):
    """The figures are those of 30.5 billion parameters, of which 29.0 are the experts'."""
    everything = planned(tmp_path, SHAPES["qwen3-30b-a3b"], 139.8)
    assert everything.facts["weights_bytes"] == pytest.approx(2 * 30.5e9, rel=0.005)
    for flags in ({}, {"expert_parallel": True}):
        half = planned(tmp_path, SHAPES["qwen3-30b-a3b"], 139.8, tp_size=2, **flags)
        assert half.facts["weights_bytes"] == pytest.approx(30.5e9, rel=0.01)
        assert half.level is Level.OK
    assert planned(tmp_path, SHAPES["qwen3-30b-a3b"], 48).level is Level.FAIL
    quantized = planned(tmp_path, SHAPES["qwen3-30b-a3b"], 48, quantization="fp8")
    assert quantized.facts["weights_bytes"] == pytest.approx(30.5e9 + 2 * 0.31e9, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "flags", "sentence"),
    [
        ("qwen3-30b-a3b", {"tp_size": 3, "expert_parallel": True}, "num_attention_heads is 32, which 3 ranks cannot"),
        ("gpt-oss-20b", {"tp_size": 64, "expert_parallel": True}, "number of experts is 32"),
        ("llama-1b", {"tp_size": 2, "expert_parallel": True}, "expert_parallel=T: the model has no experts"),
    ],
)
def test_sizes_of_mixtures_that_ranks_cannot_share_fail(shape, flags, sentence, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[shape] | {"head_dim": 64}))
    found = only("model", tmp_path, 80, load_format="dummy", **flags)
    assert found.level is Level.FAIL
    assert sentence in found.text
    assert found.fix


def test_sizes_that_fp8_has_no_products_for_fail(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"intermediate_size": 8208}))
    assert findings("flags", tmp_path, 80, load_format="dummy", quantization="fp8") == []
    halves = only("flags", tmp_path, 80, load_format="dummy", quantization="fp8", tp_size=2)
    assert "intermediate_size is 4104 on each of tp_size=2 ranks" in halves.text


def test_integer_weights_are_for_sizes_in_groups(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    flags = {"load_format": "dummy", "quantization": "int8"}
    assert findings("flags", tmp_path, 80, **flags) == []
    assert findings("flags", tmp_path, device="cpu", **flags) == []
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B | {"intermediate_size": 8208}))
    refused = only("flags", tmp_path, device="cpu", **flags)
    assert "intermediate_size is 8208, which is not a multiple of 32" in refused.text


def test_the_experts_of_a_mixture_become_integers(tmp_path):
    """A scale of four bytes for 128 inputs adds a quarter of a bit to a weight. Embedding and head have more bits."""
    found = planned(tmp_path, SHAPES["qwen3-30b-a3b"], 32, quantization="int4")
    assert found.facts["weights_bytes"] == pytest.approx(30.5e9 * 4.25 / 8, rel=0.05)
    assert found.level is Level.OK


def test_a_place_that_cannot_be_written_to_fails(tmp_path):
    (tmp_path / "file").write_text("no directory")
    found = only("compile cache", compile_cache_dir=str(tmp_path / "file" / "cache"))
    assert found.level is Level.FAIL
    assert "compile_cache_dir=" in found.fix


def test_a_wrong_flag_is_answered_with_the_nearest():
    wrong = run(main, "tp_sise=2")
    assert (wrong.status, wrong.stderr.count("did you mean tp_size=?")) == (2, 1)
    assert run(main, "device=cpu", "--gpu-memory", "80").status == 2


def planned(tmp_path: Path, config: dict[str, Any], gib: float, **flags: Any) -> Finding:
    """Return the finding about the memory of a model that is only a config.json."""
    model = tmp_path / "planned"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    return only("memory", model, gib, load_format="dummy", **flags)


def test_the_plan_for_a_gpu_is_about_what_one_was_measured_to_hold(tmp_path):
    """docs/gpus.md has the worker's own figures on an H200."""
    small = planned(
        tmp_path, LLAMA_1B, 139.8, kv_cache_num_tokens="auto", use_cudagraphs=True, max_seqs_per_forward=8192,
        max_tokens_per_forward=16384,
    )  # fmt: skip
    assert small.level is Level.OK
    assert small.facts["cache_tokens_that_fit"] == pytest.approx(4_161_536, rel=0.03)
    large = planned(tmp_path, LLAMA_8B, 139.8, kv_cache_num_tokens="auto")
    assert large.facts["weights_bytes"] == pytest.approx(15.0 * 2**30, rel=0.02)
    assert large.facts["bytes_per_token"] == 128 * 1024 + 4
    halves = planned(tmp_path, LLAMA_8B, 139.8, kv_cache_num_tokens="auto", tp_size=2)
    assert halves.facts["weights_bytes"] == pytest.approx(large.facts["weights_bytes"] / 2, rel=0.02)
    assert halves.facts["bytes_per_token"] == 64 * 1024 + 4


def test_a_cache_that_does_not_fit_fails_and_the_size_that_is_named_fits(tmp_path):
    assert planned(tmp_path, LLAMA_8B, 12).fix.startswith("a GPU with more memory")
    fails = planned(tmp_path, LLAMA_8B, 24, kv_cache_num_tokens=1 << 20)
    assert fails.level is Level.FAIL
    size = int(re.search(r"kv_cache_num_tokens=(\d+)", fails.fix)[1])
    fits = planned(tmp_path, LLAMA_8B, 24, kv_cache_num_tokens=size, max_context_tokens=1024)
    assert fits.level is Level.OK
    doubtful = planned(tmp_path, LLAMA_8B, 24, kv_cache_num_tokens=size + 4096, max_context_tokens=1024)
    assert doubtful.level is Level.WARN
    short = planned(tmp_path, LLAMA_8B, 24, kv_cache_num_tokens=4096)
    assert "longer requests are refused" in short.text


def test_a_model_that_transformers_computes_is_checked(tmp_path):
    directory = make_foreign_checkpoint(tmp_path / "gpt2", "gpt2")
    assert "GPT2LMHeadModel runs through transformers" in only("model", directory, device="cpu").text
    assert only("weights", directory, device="cpu").level is Level.OK
    assert only("memory", directory, device="cpu").level is Level.OK
    refused = only("model", directory, device="cpu", quantization="fp8").text
    assert "flag quantization=fp8: GPT2LMHeadModel runs through transformers" in refused
