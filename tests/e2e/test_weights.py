"""New weights for a deployment that runs: the same answers and checksums as those of a fresh one, also after kills."""

import asyncio
import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
from safetensors.torch import load_file

from bench.server import Server, serve
from tests.checkpoints import make_checkpoint
from tests.e2e.samples import random_prompt
from tests.gateway.deployment import eventually
from tests.trainer import Tensors, Trainer
from tests.worker.uploading import tensors_of

pytestmark = pytest.mark.slow

TIMEOUT_S = 120


async def answers(server: Server, count: int = 24) -> list:
    """Greedy and drawn answers with log-probabilities.

    They are asked one after the other and share no prefix, so that all deployments compute the same batches.
    """
    found = []
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", timeout=TIMEOUT_S) as client:
        for number in range(count):
            prompt = random_prompt(28 + 8 * (number % 24), 400, number)
            answer = await client.completions.create(
                model=server.model, prompt=prompt, max_tokens=20, logprobs=2,
                seed=number, temperature=number % 2, extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            choice = answer.choices[0]
            found.append((choice.token_ids, choice.logprobs.token_logprobs))
    return found


def update(server: Server, directory: Path, version: str) -> httpx.Response:
    body = {"model_path": str(directory), "weight_version": version}
    return httpx.post(f"{server.base_url}/update_weights_from_disk", json=body, timeout=TIMEOUT_S)


def upload(server: Server, checkpoint: Path, version: str) -> httpx.Response:
    content = (checkpoint / "model.safetensors").read_bytes()
    return httpx.put(f"{server.base_url}/weights?weight_version={version}", content=content, timeout=TIMEOUT_S)


def checksums(server: Server) -> list[dict]:
    schedulers = httpx.get(f"{server.base_url}/weights?checksums=true", timeout=TIMEOUT_S).json()["schedulers"]
    return [worker["checksums"] for scheduler in schedulers for worker in scheduler["workers"]]


def check_updates(directory: Path, flags: dict, count: int = 24) -> None:
    """Update a deployment of the checkpoint ``directory / "0"`` three times, at last to ``directory / "1"``.

    Compare it with a fresh deployment of that checkpoint, by ``count`` answers.
    """
    old, new = directory / "0", directory / "1"
    with serve(model=old, weight_directories=directory, **flags) as server:
        before = asyncio.run(answers(server))
        for response in (update(server, new, "first"), upload(server, old, "second"), update(server, new, "third")):
            assert response.status_code == 200, response.text
        after, sums = asyncio.run(answers(server, count)), checksums(server)
    with serve(model=new, **flags) as fresh:
        assert asyncio.run(answers(fresh, count)) == after
        assert checksums(fresh) == sums
    assert after[: len(before)] != before


NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.2.mlp.gate_proj.weight",
    "model.norm.weight",
)


def check_tensors(server: Server, checkpoint: Path, schedulers: int) -> None:
    """Compare tensors in the memory of the workers of each scheduler with those of ``checkpoint``."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name in NAMES:
        body = {"name": name, "truncate_size": 20}
        found = httpx.post(f"{server.base_url}/get_weights_by_name", json=body, timeout=TIMEOUT_S).json()
        for each in found if schedulers > 1 else [found]:
            np.testing.assert_allclose(each, tensors[name][:20].float().numpy(), rtol=0.01, err_msg=name)


def is_complete(server: Server) -> bool:
    """Return whether every scheduler has its workers."""
    return httpx.get(f"{server.base_url}/weights", timeout=TIMEOUT_S).status_code == 200


def workers(server: Server) -> list[int]:
    """Process ids of the workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
            if b"services.worker" in command and parent == server.process.pid:
                found.append(int(path.parent.name))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoints")
    for seed in range(3):
        make_checkpoint(directory / str(seed), "qwen3", seed=seed)
    return directory


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}], ids=["alone", "tp", "pp", "dp"])
def test_after_an_update_answers_are_those_of_a_fresh_deployment(checkpoints, sizes):
    flags = {"device": "cpu", "kv_cache_num_tokens": 16 * 400, "torch_num_threads": 1} | sizes
    with serve(model=checkpoints / "0", weight_directories=checkpoints, **flags) as server:
        before = asyncio.run(answers(server))
        response = update(server, checkpoints / "1", "first")
        assert (response.status_code, response.json()["weight_version"]) == (200, "first"), response.text
        after, sums = asyncio.run(answers(server)), checksums(server)
        check_tensors(server, checkpoints / "1", sizes.get("dp_size", 1))
        refused = update(server, checkpoints / "none", "second")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model_path")
        assert checksums(server) == sums
    with serve(model=checkpoints / "1", **flags) as fresh:
        assert asyncio.run(answers(fresh)) == after != before
        assert checksums(fresh) == sums


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp", "pp"])
def test_after_updates_of_a_mixture_answers_are_those_of_a_fresh_deployment(tmp_path, sizes):
    for seed in range(2):
        make_checkpoint(tmp_path / str(seed), "qwen3_moe", seed=seed)
    flags = {"device": "cpu", "kv_cache_num_tokens": 16 * 400, "torch_num_threads": 1} | sizes
    check_updates(tmp_path, flags)


def test_a_worker_that_is_killed_returns_with_the_committed_weights(checkpoints):
    flags = {"device": "cpu", "kv_cache_num_tokens": 16 * 400, "torch_num_threads": 1}
    with serve(model=checkpoints / "0", weight_directories=checkpoints, **flags) as server:
        for number in (1, 2):
            assert update(server, checkpoints / str(number), f"v{number}").status_code == 200
        sums, before = checksums(server), asyncio.run(answers(server, 4))
        [worker] = workers(server)
        os.kill(worker, signal.SIGKILL)
        assert asyncio.run(answers(server, 4)) == before
        assert checksums(server) == sums
        assert workers(server) != [worker]


UPLOADED = [{}, {"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2}, {"quantization": "fp8"}]


def kill_a_worker(server: Server) -> tuple[list, object]:
    """Kill a worker, and check that the weights stay the same. Return answers and checksums."""
    after, sums = asyncio.run(answers(server)), checksums(server)
    httpx.post(f"{server.base_url}/reset_prefix_cache", timeout=TIMEOUT_S)  # the other replica computes prompts too
    os.kill(workers(server)[0], signal.SIGKILL)
    assert asyncio.run(answers(server)) == after
    eventually(lambda: is_complete(server))
    assert checksums(server) == sums
    return after, sums


@pytest.mark.parametrize("flags", UPLOADED, ids=["alone", "tp", "pp", "dp", "fp8"])
def test_after_an_upload_answers_are_those_of_a_fresh_deployment(checkpoints, tmp_path, flags):
    """The server does not see the directory of the checkpoint. A worker that is killed gets the upload again."""
    flags = {"device": "cpu", "kv_cache_num_tokens": 16 * 400, "torch_num_threads": 1} | flags
    with serve(model=checkpoints / "0", weight_directories=tmp_path, **flags) as server:
        before = asyncio.run(answers(server))
        for number in (2, 1):
            response = upload(server, checkpoints / str(number), f"v{number}")
            assert (response.status_code, response.json()["weight_version"]) == (200, f"v{number}"), response.text
        after, sums = kill_a_worker(server)
        assert len(list(tmp_path.glob("toka-uploads/*/*"))) == flags.get("dp_size", 1)  # ranks share it
    assert list(tmp_path.glob("toka-uploads/*")) == []
    with serve(model=checkpoints / "1", **flags) as fresh:
        assert asyncio.run(answers(fresh)) == after != before
        assert checksums(fresh) == sums


def described(tensors: Tensors, dtypes: str = "dtypes") -> dict:
    return {
        "names": list(tensors),
        dtypes: [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
        "shapes": [list(each.shape) for each in tensors.values()],
    }


def broadcast(server: Server, checkpoint: Path, version: str, style: str) -> None:
    """Replace the weights as a trainer of SGLang or vLLM does, with a group of its own, in two buckets."""
    tensors, called = tensors_of(checkpoint), partial(post, server)
    count = httpx.get(f"{server.base_url}/get_world_size", timeout=TIMEOUT_S).json()["world_size"]
    with Trainer(count + 1, "weight_update_group" if style == "sglang" else "weight_transfer") as trainer:
        group = trainer.address | {"rank_offset": 1, "backend": "gloo"}
        if style == "sglang":
            called("/init_weights_update_group", group)
        else:
            called("/init_weight_transfer_engine", {"init_info": group})
            called("/start_weight_update", {"is_checkpoint_format": True})
        names = list(tensors)
        for part in (names[5:], names[:5]):
            bucket = {name: tensors[name] for name in part}
            trainer.send(bucket.values())
            if style == "sglang":
                body = described(bucket) | {"weight_version": version, "flush_cache": False}
                called("/update_weights_from_distributed", body | {"group_name": trainer.name})
            else:
                called("/update_weights", {"update_info": described(bucket, "dtype_names") | {"packed": False}})
        if style == "vllm":
            called("/finish_weight_update", {"weight_version": version})
        called("/destroy_weights_update_group", {"group_name": trainer.name})


def post(server: Server, path: str, body: dict) -> dict:
    response = httpx.post(server.base_url + path, json=body, timeout=TIMEOUT_S)
    assert response.status_code == 200, response.text
    return response.json()


BROADCAST = [({}, "vllm"), *((flags, "sglang") for flags in UPLOADED[1:])]


@pytest.mark.parametrize(("flags", "style"), BROADCAST, ids=["alone", "tp", "pp", "dp", "fp8"])
def test_after_a_broadcast_answers_are_those_of_a_fresh_deployment(checkpoints, tmp_path, flags, style):
    """A worker that is killed gets the received weights again."""
    flags = {"device": "cpu", "kv_cache_num_tokens": 16 * 400, "torch_num_threads": 1} | flags
    with serve(model=checkpoints / "0", weight_directories=tmp_path, **flags) as server:
        eventually(lambda: is_complete(server))
        before = asyncio.run(answers(server))
        for number in (2, 1):
            broadcast(server, checkpoints / str(number), f"v{number}", style)
        after, sums = kill_a_worker(server)
        assert len(list(tmp_path.glob("toka-uploads/*/*"))) == flags.get("dp_size", 1)  # ranks share it
    with serve(model=checkpoints / "1", **flags) as fresh:
        assert asyncio.run(answers(fresh)) == after != before
        eventually(lambda: is_complete(fresh))
        assert checksums(fresh) == sums
