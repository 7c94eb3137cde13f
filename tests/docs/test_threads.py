"""Which thread runs what, in a deployment that answers, is what docs/architecture.md says."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from bench.server import Server, serve
from tests.docs.threads import CALLERS, SERVICES, row_of, threads

NOTING = Path(__file__).parent / "noting"
PROCESSES = {
    "services.gateway": "gateway",
    "services.scheduler": "scheduler",
    "services.worker": "worker",
    "services.launcher.toka": "toka",
    "services.scheduler.grammar.child": "grammar child",
}
# Threads that libraries start for us: their targets.
STARTED = {
    ("scheduler", "_run"): "gRPC's sender",
    ("worker", "_serve"): "gRPC's events",
    ("grammar child", "_serve"): "grammar child's own",
    ("gateway", "_connection_worker_thread"): "_connection_worker_thread",
}
MAIN = {"event loop", "main thread"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}


@pytest.fixture
def noted(tmp_path, monkeypatch) -> Iterator[tuple[Server, Path]]:
    """A deployment, and the folder of what its processes note."""
    folder = tmp_path / "noted"
    folder.mkdir()
    paths = [str(NOTING), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("NOTE_THREADS", str(folder))
    settings = {"store_dir": tmp_path / "store", "record_plans": tmp_path / "plans", "torch_num_threads": 2}
    with serve(device="cpu", dtype="float32", kv_cache_num_tokens=16 * 1024, **settings) as server:
        yield server, folder


@pytest.mark.profiled
@pytest.mark.timeout(600)  # everything is slow while it is looked at
def test_every_file_runs_where_the_page_says(noted):
    server, folder = noted
    use(server)
    server.process.terminate()
    server.process.wait()
    wrong, seen = set(), set()
    for file in folder.iterdir():
        process = PROCESSES[file.name.rpartition("-")[0]]
        for line in file.read_text().splitlines():
            path, thread, function = line.split("\t")
            if not Path(path).is_relative_to(SERVICES):
                continue
            row, names = row_of(str(Path(path).relative_to(SERVICES))), named(process, thread)
            seen |= {(process, name) for name in names}
            if row.processes != {"all"} and process not in row.processes:
                wrong.add(f"{row.path}: also in {process}, {function} of {path}")
            elif not names & row.threads and not CALLERS.search(row.text):
                wrong.add(f"{row.path}: also on {' or '.join(names)} of {process}, {function} of {path}")
    assert sorted(wrong) == []
    assert {process for process, _ in seen} == set(PROCESSES.values())
    unknown = {(process, name) for process, name in seen if process not in threads().get(name, ())}
    assert {each for each in unknown if each[1] not in MAIN} == set()


def named(process: str, thread: str) -> set[str]:
    """What the page calls a thread of Python's; all that it may be."""
    if thread == "MainThread":
        return MAIN
    started = re.fullmatch(r"Thread-\d+ \((\w+)\)", thread)
    return {STARTED[process, started[1]] if started else re.sub(r"\d+", "N", thread)}


def use(server: Server) -> None:
    """Most of what there is."""
    with openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": "Hello"}]
        chat = {"model": model, "messages": messages, "max_tokens": 8}
        assert client.chat.completions.create(**chat, n=2, logprobs=True).usage
        assert list(client.chat.completions.create(**chat, stream=True, stop=["zz"]))
        assert client.chat.completions.create(**chat, response_format=SCHEMA).choices
        assert client.responses.create(model=model, input="Hello", max_output_tokens=4).id
        prompt = "word " * 150  # more than a shard
        asked = {"prompt_logprobs": 2, "top_k": 5, "frequency_penalty": 0.5}
        assert client.completions.create(model=model, prompt=prompt, max_tokens=8, n=4, extra_body=asked).choices
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": model, "prompt": "Hi"}}
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", extra_body={}
        )
        while batch.status not in ("completed", "failed"):
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
