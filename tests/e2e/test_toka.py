"""The one-host deployment as its user sees it: real processes, started, crashed and stopped."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from bench.server import free_port, serve

TOKA = [sys.executable, "-m", "services.launcher.toka"]
QUESTION = "Question: Tom has 3 bags with 4 apples each. How many apples does Tom have?\nAnswer:"


def children_running(parent: int, module: str) -> list[psutil.Process]:
    return [child for child in psutil.Process(parent).children() if module in child.cmdline()]


def child_running(parent: int, module: str) -> psutil.Process:
    for child in children_running(parent, module):
        return child
    raise LookupError(f"no child runs {module}")


def wait_for(condition, timeout_s: float = 60.0):
    """Poll ``condition`` until it holds; the tests have no other way to learn of another process's state."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def complete(server, *, stream: bool = False, **settings):
    """An answer, or its chunks as they come."""
    settings = {"max_tokens": 16, "temperature": 0, "prompt": QUESTION} | settings
    if stream:
        return chunks(server, **settings)
    with client_of(server) as client:
        return client.completions.create(model=server.model, **settings)


def chunks(server, **settings) -> Iterator[openai.types.Completion]:
    with client_of(server) as client:
        yield from client.completions.create(model=server.model, stream=True, **settings)


def client_of(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def server():
    """Its children are killed, and it serves again after each test."""
    with serve(device="cpu", dtype="float32") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("service", ["scheduler", "gateway"])
def test_a_killed_child_is_replaced(server, service):
    before = complete(server).choices[0].text
    victim = child_running(server.process.pid, f"services.{service}")
    victim.kill()
    wait_for(lambda: is_gone(victim.pid))

    def answers() -> bool:
        try:
            return complete(server).choices[0].text == before
        except (openai.APIConnectionError, openai.InternalServerError, httpx.TransportError):
            return False

    wait_for(answers)
    assert child_running(server.process.pid, f"services.{service}").pid != victim.pid


def answer_over_a_crash(server, victim: psutil.Process) -> str:
    """A long answer, during which ``victim`` is killed."""
    stream = complete(server, max_tokens=100, stream=True, extra_body={"ignore_eos": True})
    text = next(stream).choices[0].text
    victim.kill()
    return text + "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.slow
def test_a_stream_outlives_a_crash_of_the_worker_which_is_replaced(server):
    expected = complete(server, max_tokens=100, extra_body={"ignore_eos": True}).choices[0].text
    victim = child_running(server.process.pid, "services.worker")
    assert answer_over_a_crash(server, victim) == expected
    # A fast worker may have computed the whole answer before it was killed. Then its successor may still have to start.
    wait_for(lambda: {child.pid for child in children_running(server.process.pid, "services.worker")} - {victim.pid})


@pytest.fixture(scope="module")
def ranks():
    with serve(device="cpu", dtype="float32", tp_size=2, pp_size=2) as server:
        yield server


@pytest.mark.slow
def test_four_ranks_answer_as_one_worker_does_and_are_restarted_together(builtin_server, ranks):
    questions = [QUESTION, f"Now think. {QUESTION}", "Question: What is 2+2?\nAnswer:"]
    expected = [complete(builtin_server, prompt=question).choices[0].text for question in questions]
    long = complete(builtin_server, max_tokens=100, extra_body={"ignore_eos": True}).choices[0].text
    assert [complete(ranks, prompt=question).choices[0].text for question in questions] == expected
    before = children_running(ranks.process.pid, "services.worker")
    assert answer_over_a_crash(ranks, before[2]) == long
    after = children_running(ranks.process.pid, "services.worker")
    assert len(before) == len(after) == 4
    assert {child.pid for child in before}.isdisjoint(child.pid for child in after)


@pytest.mark.slow
def test_nothing_outlives_a_parent_that_is_killed(ranks):
    """The last test of them."""
    pids = [child.pid for child in psutil.Process(ranks.process.pid).children(recursive=True)]
    assert len(pids) >= 6
    ranks.process.kill()
    wait_for(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.slow
def test_two_replicas_share_the_work_and_sigterm_ends_everything():
    with serve(device="cpu", dtype="float32", dp_size=2) as server:
        wait_for(lambda: server.metric("toka_replica_ready") == 2)
        texts = {complete(server, prompt=f"{number} {QUESTION}").choices[0].text for number in range(8)}
        assert all(texts)
        ends_everything(server.process, signal.SIGTERM)


def ends_everything(process: subprocess.Popen, number: int) -> None:
    """The signal does, and that is no failure."""
    pids = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    sockets = [Path(c.laddr) for pid in pids for c in psutil.Process(pid).net_connections("unix") if c.laddr]
    assert len(pids) >= 3
    process.send_signal(number)
    assert process.wait(timeout=60) == 0
    assert all(is_gone(pid) for pid in pids)
    assert not any(path.exists() for path in sockets if "toka-" in str(path))


def run_toka(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run([*TOKA, *arguments], capture_output=True, text=True, env=os.environ | environment, timeout=60)


def test_a_wrong_flag_is_explained():
    outcome = run_toka("modle=x")
    assert outcome.returncode == 2
    assert "unknown flag 'modle'" in outcome.stderr
    assert "did you mean model=?" in outcome.stderr


def test_a_model_that_does_not_exist_ends_with_the_reason():
    outcome = run_toka("model=/no/such/model")
    assert outcome.returncode == 1
    assert "model='/no/such/model' is not a directory" in outcome.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_hub_that_does_not_answer(number):
    with socket.create_server(("127.0.0.1", 0)) as hub:
        environment = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HUB_OFFLINE": "0"}
        command = [*TOKA, "model=some/model", "port=0", "grpc_port=0"]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | environment)
        try:
            asking, _ = hub.accept()
            process.send_signal(number)
            assert process.wait(timeout=30) == 0
            asking.close()
        finally:
            process.kill()
            process.wait()


def test_a_child_that_cannot_start_ends_everything_with_its_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "architectures": ["NoSuchModel"]}')
    outcome = run_toka(f"model={tmp_path}", f"port={free_port()}", f"grpc_port={free_port()}")
    assert outcome.returncode == 1
    assert "before it was ready" in outcome.stderr


def test_a_port_in_use_is_explained(builtin_server):
    port = builtin_server.base_url.rpartition(":")[2]
    outcome = run_toka(f"port={port}", f"grpc_port={free_port()}")
    assert outcome.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in outcome.stderr


def test_the_banners_curl_line_works_and_ctrl_c_ends_everything():
    port = free_port()
    process = subprocess.Popen(
        [*TOKA, f"port={port}", f"grpc_port={free_port()}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        line = next(line for line in process.stdout if line.strip().startswith("curl"))
        outcome = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
        assert '"role":"assistant"' in outcome.stdout.replace(" ", "")
        ends_everything(process, signal.SIGINT)
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.parametrize("chat", ["T", "F"])
def test_ping_prints_the_answer(builtin_server, chat):
    port = builtin_server.base_url.rpartition(":")[2]
    command = [sys.executable, "-m", "services.launcher.ping", f"port={port}", f"chat={chat}", "max_tokens=8"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert outcome.stdout.strip()


def test_ping_hides_the_answer_if_asked(builtin_server):
    port = builtin_server.base_url.rpartition(":")[2]
    flags = (f"port={port}", "max_tokens=8", "n=3", "hide=T", "retries=1")
    command = [sys.executable, "-m", "services.launcher.ping", *flags]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"3 samples in \d+\.\d\d s\n", outcome.stdout)


def test_ping_says_when_nobody_answers():
    command = [sys.executable, "-m", "services.launcher.ping", f"port={free_port()}"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert "is toka running there?" in outcome.stderr


def test_download_checks_a_local_model():
    command = [sys.executable, "-m", "services.launcher.download", "model=builtin"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (Path(outcome.stdout.strip()) / "model.safetensors").exists()
