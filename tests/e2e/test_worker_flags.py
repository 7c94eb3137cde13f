"""The worker's flags as the user of a whole deployment on a CPU meets them: honoured, or refused with a sentence."""

import os
import subprocess
import sys

import openai
import pytest

from bench.server import Server, free_port, serve
from tests.checkpoints import make_checkpoint

pytestmark = pytest.mark.slow

TOKA = [sys.executable, "-m", "services.launcher.toka"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Sizes that fp8 products take."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "llama", vocab_size=416)


def answer(server: Server) -> list[int]:
    """Tokens of one greedy answer, as the API counts and names them."""
    settings = {"max_tokens": 8, "temperature": 0, "logprobs": 1, "extra_body": {"ignore_eos": True}}
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        found = client.completions.create(model=server.model, prompt="The scheduler sends plans", **settings)
    assert found.usage.completion_tokens == 8
    assert all(value <= 0 for value in found.choices[0].logprobs.token_logprobs)
    return found.choices[0].logprobs.tokens


def refused(*arguments: str, **environment: str) -> str:
    """What ``toka`` says when it does not start."""
    command = [*TOKA, f"port={free_port()}", f"grpc_port={free_port()}", *arguments]
    outcome = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | environment, timeout=60, check=False
    )
    assert outcome.returncode in (1, 2), outcome.stderr
    return outcome.stderr


def test_dummy_weights_need_a_config_and_a_tokenizer_only(checkpoint, tmp_path):
    for path in checkpoint.iterdir():
        if path.suffix == ".json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert "there are no weights" in refused(f"model={tmp_path}", "device=cpu")
    with serve(model=tmp_path, device="cpu", load_format="dummy") as server:
        assert answer(server)


def test_fp8_runs_on_a_cpu_as_a_reference(checkpoint):
    with serve(model=checkpoint, device="cpu", quantization="fp8") as server:
        assert answer(server)


def test_a_deployment_with_shared_prefixes_serves_on_a_cpu(checkpoint):
    with serve(model=checkpoint, device="cpu", use_hydragen=True, hydragen_min_group_size=129) as server:
        assert answer(server)


def test_a_directory_for_compiled_code_that_cannot_be_written_is_refused(checkpoint):
    said = refused(f"model={checkpoint}", "device=cpu", "compile_cache_dir=/proc/kernels")
    assert "flag compile_cache_dir=/proc/kernels: cannot write there" in said


def test_a_worker_that_compiles_nothing_needs_no_home(checkpoint, monkeypatch):
    monkeypatch.setenv("HOME", "/proc")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with serve(model=checkpoint, device="cpu") as server:
        assert answer(server)
