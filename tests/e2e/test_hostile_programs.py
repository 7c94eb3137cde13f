"""The programs end with a sentence and a status when a model's files are hostile, not with a traceback."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.server import free_port
from services.client.llm import LLM
from services.common.errors import Unavailable
from services.common.model.files import BUILTIN

pytestmark = pytest.mark.slow

CONFIG = json.loads((BUILTIN / "config.json").read_text())
SETTINGS = json.loads((BUILTIN / "tokenizer_config.json").read_text())
MANY_LAYERS = ("config.json", json.dumps(CONFIG | {"num_hidden_layers": 10**9}))
CUT = ("tokenizer.json", (BUILTIN / "tokenizer.json").read_text()[:-100])
NUMBER = ("tokenizer_config.json", json.dumps(SETTINGS | {"chat_template": 5}))
LIST = ("config.json", "[]")
WORKER = ("services.worker", "worker_listen=unix:{tmp}/worker.sock", "device=cpu")
SCHEDULER = ("services.scheduler", "scheduler_listen=127.0.0.1:0", "worker_addresses=unix:{tmp}/worker.sock")
GATEWAY = ("services.gateway", "port=0", "scheduler_addresses=127.0.0.1:1", "store_url=none")
TOKA = ("services.launcher", "port=0", "grpc_port=0", "device=cpu", "store_url=none")
DOCTOR = ("services.cli.doctor", "port=0", "grpc_port=0", "device=cpu")


def hostile(directory: Path, name: str, content: str) -> Path:
    shutil.copytree(BUILTIN, directory)
    (directory / name).write_text(content)
    return directory


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("program", "file", "sentence"),
    [
        (TOKA, LIST, "config.json is a list; expected a JSON object"),
        (TOKA, MANY_LAYERS, "num_hidden_layers=1000000000 is not supported; expected an integer from 1 to 4,096"),
        (WORKER, MANY_LAYERS, "num_hidden_layers=1000000000 is not supported; expected an integer from 1 to 4,096"),
        (SCHEDULER, CUT, "tokenizer.json: loading it failed"),
        (GATEWAY, NUMBER, "tokenizer_config.json: chat_template=5 is not supported; expected a string"),
        (DOCTOR, MANY_LAYERS, "num_hidden_layers=1000000000 is not supported"),
        (("services.launcher.download",), LIST, "config.json is a list; expected a JSON object"),
    ],
)
def test_a_program_ends_with_a_sentence(program, file, sentence, tmp_path):
    module, *flags = (part.format(tmp=tmp_path) for part in program)
    command = [sys.executable, "-m", module, *flags, f"model={hostile(tmp_path / 'model', *file)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, said
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.timeout(300)
def test_the_python_client_raises_the_sentence(tmp_path):
    directory = hostile(tmp_path / "model", *MANY_LAYERS)
    with pytest.raises(Unavailable, match="num_hidden_layers=1000000000 is not supported"):
        LLM(str(directory), device="cpu", grpc_port=free_port())
