"""``toka model=.`` in a model's directory whose author left more there than a model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from services.common.model.files import BUILTIN

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
# Modules that the services import, modules of the standard library, and modules that Python imports by itself.
MODULES = (
    *("orjson", "torch", "grpc", "numpy", "tokenizers", "numba", "triton", "llguidance", "sqlalchemy", "uvicorn"),
    *("json", "signal", "multiprocessing", "sitecustomize", "usercustomize"),
    *("services/__init__", "services/worker/__init__", "tokasaurus/__init__"),
)
COMMAND = "from services.launcher.__main__ import main\nmain()\n"
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


@pytest.fixture
def directory(tmp_path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for path in BUILTIN.iterdir():
        (made / path.name).symlink_to(path)
    for name in MODULES:
        module = made / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + chr(10))\n")
    return made


def toka(directory: Path, **pipes) -> subprocess.Popen:
    """Start the program as pip installs it: a file in a directory of its own."""
    program = directory.parent / "bin" / "toka"
    program.parent.mkdir()
    program.write_text(COMMAND)
    command = [sys.executable, str(program), "model=.", "port=0", "grpc_port=0", "store_url=none"]
    command += ["device=cpu", "torch_num_threads=1", "kv_cache_num_tokens=2048"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=directory, env=environment, text=True, **pipes)


@pytest.mark.timeout(300)
def test_a_models_directory_is_served_and_no_module_in_it_is_run(directory, tmp_path):
    process = toka(directory, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        url = next(found[0] for line in process.stdout if (found := re.search(r"http://127\.0\.0\.1:\d+", line)))
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": ".",
                "messages": [{"role": "user", "content": "2 + 2?"}],
                "max_tokens": 30,
                "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
            },
            timeout=120,
            trust_env=False,
        )
        assert answer.status_code == 200, answer.text
    finally:
        process.terminate()
        process.communicate()
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


@pytest.mark.timeout(300)
def test_settings_of_numba_in_a_models_directory_are_refused(directory):
    (directory / ".numba_config.yaml").write_text("cache_dir: .\n")
    process = toka(directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"{directory / '.numba_config.yaml'}: numba would take its settings" in errors
    assert "Traceback" not in errors
