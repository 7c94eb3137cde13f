"""Blocks of the pages that a comment in front marks as runnable are run, against one deployment with the built-in
model.

``<!-- run -->`` runs a block of Python or of a shell by itself, ``<!-- run with client -->`` one of Python with
``client`` and ``model`` in place. Blocks of one page share their variables and a directory. An ``LLM`` is that of the
deployment, too: ``tests/client/test_engine.py`` starts some of its own.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI, Stream

from bench.server import Server, serve
from services.common.model.files import BUILTIN
from tests.docs.pages import Block, blocks, pages

pytestmark = pytest.mark.timeout(300)  # a worker boots

RUNNABLE = [block for page in pages() for block in blocks(page) if block.mark]
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "tokasaurus-builtin", "prompt": "One, two,", "max_tokens": 4},
}


def named(block: Block) -> str:
    return f"{block.page}:{block.line}"


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recordings")


@pytest.fixture(scope="module")
def server(tmp_path_factory, recordings) -> Iterator[Server]:
    directories = {"store_dir": tmp_path_factory.mktemp("store"), "record_plans": recordings}
    directories["weight_directories"] = tmp_path_factory.mktemp("weights")
    with serve(device="cpu", dtype="float32", kv_cache_num_tokens=32 * 1024, **directories) as server:
        yield server


@pytest.fixture(scope="module")
def variables() -> dict[str, dict[str, Any]]:
    """Return the variables of each page."""
    return {}


@pytest.fixture(scope="module")
def clients() -> Iterator[list[Any]]:
    """Yield a list for the clients and streams that pages leave open, also under names that they use again. These are
    closed at the end."""
    with contextlib.ExitStack() as opened:
        found: list[Any] = []
        yield found
        for each in found:
            opened.callback(each.close)


@pytest.fixture
def directory(tmp_path_factory, monkeypatch) -> Path:
    """What pages take for granted is in it."""
    made = tmp_path_factory.getbasetemp() / "pages"
    made.mkdir(exist_ok=True)
    (made / "in.jsonl").write_text(json.dumps(LINE) + "\n")
    shutil.copy(BUILTIN / "model.safetensors", made)
    monkeypatch.chdir(made)
    return made


def test_what_is_marked_can_be_run():
    assert len(RUNNABLE) >= 10
    for block in RUNNABLE:
        assert (block.language, block.mark) in {("python", "run"), ("python", "run with client"), ("sh", "run")}


@pytest.mark.parametrize("block", RUNNABLE, ids=named)
def test_a_block_runs_and_prints(server, recordings, variables, clients, directory, capsys, block: Block):
    base, grpc = server.base_url.removeprefix("http://"), server.grpc_address
    code = block.code.replace("127.0.0.1:10210", base).replace("127.0.0.1:10310", grpc)
    code = code.replace('LLM("builtin")', f'LLM("builtin", address="{grpc}")')
    if block.language == "sh":
        printed = run_in_a_shell(code.replace("record=DIR", f"record={recordings}"))
    else:
        known = variables.setdefault(block.page, {"__name__": "__main__"})
        if block.mark == "run with client" and "client" not in known:
            known |= {"client": OpenAI(base_url=f"{server.base_url}/v1", api_key="none"), "model": server.model}
        exec(compile(code, named(block), "exec"), known)
        clients += [value for value in known.values() if isinstance(value, OpenAI | Stream) and value not in clients]
        printed = capsys.readouterr().out
    assert printed.strip(), "it prints nothing"
    assert not printed.startswith('{"error"'), printed


def run_in_a_shell(code: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
    environment = inherited | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr
