"""The engine as children of a script: the real services with the built-in model."""

import contextlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from services.client import LLM, SamplingParams
from services.common.errors import InvalidRequest, Unavailable
from tests.gateway.deployment import eventually

API = Path(__file__).parents[2] / "docs" / "api.md"
QUESTION = "Question: A book costs $7 and a pen costs $2. How much do 3 books and 4 pens cost?\nAnswer:"
FLAGS = {"device": "cpu", "dtype": "float32", "kv_cache_num_tokens": 16 * 1024}


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    return not any(map(running, processes))


def running(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def engine_processes() -> list[psutil.Process]:
    """``toka`` and all that it started for an ``LLM`` of this process, which may have other servers as well."""
    asked = {"services.launcher.toka", "gateways=0"}
    started = [child for child in psutil.Process().children() if asked <= set(child.cmdline())]
    return [process for toka in started for process in (toka, *descendants(toka.pid))]


@pytest.fixture(scope="module")
def llm():
    with LLM(**FLAGS) as made:
        yield made


def test_an_engine_of_its_own_answers(llm):
    outputs = llm.generate([QUESTION] * 3, SamplingParams(temperature=0, max_tokens=30))
    assert all(output.text and output.text == outputs[0].text for output in outputs)
    assert llm.chat([[{"role": "user", "content": "Hi"}]], SamplingParams(max_tokens=3))[0].error is None
    children = engine_processes()
    roles = {part for process in children for part in process.cmdline() if part.startswith("services.")}
    assert roles == {"services.launcher.toka", "services.scheduler", "services.worker"}


@pytest.mark.slow
def test_a_worker_that_dies_is_a_pause(llm):
    prompts = [f"{number} {QUESTION}" for number in range(8)]
    params = SamplingParams(temperature=0, max_tokens=40)
    before = [output.text for output in llm.generate(prompts, params)]
    [worker] = [process for process in engine_processes() if "services.worker" in process.cmdline()]
    worker.send_signal(signal.SIGKILL)
    assert [output.text for output in llm.generate(prompts, params)] == before


@pytest.mark.slow
def test_an_engine_that_ends_is_told_to_whoever_waits(llm):
    """The last test of it."""
    [toka] = [process for process in engine_processes() if "services.launcher.toka" in process.cmdline()]
    children = engine_processes()
    toka.send_signal(signal.SIGKILL)
    eventually(lambda: gone(children))
    [lost] = llm.generate(QUESTION)
    assert type(lost.error) is Unavailable
    assert "the engine ended" in lost.error.message


@pytest.mark.slow
def test_a_script_that_just_ends_leaves_nothing_behind():
    script = f"""
import sys
from services.client import LLM, SamplingParams
llm = LLM(**{FLAGS!r})
print(len(llm.generate("x", SamplingParams(max_tokens=3))[0].outputs[0].token_ids))
import psutil
print(*[child.pid for child in psutil.Process().children(recursive=True)])
print(sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    count, pids, loaded = done.stdout.splitlines()
    assert (count, loaded) == ("3", "[]")
    assert len(pids.split()) == 5  # toka, a scheduler, a worker, and the watchdogs of these two
    eventually(lambda: not any(psutil.pid_exists(int(pid)) for pid in pids.split()))  # watchdogs look now and then


@pytest.mark.slow
def test_the_snippet_of_the_documents_works_and_its_engine_ends_with_its_block():
    [snippet] = re.findall(r"```python\n(from services\.client.*?)```", API.read_text(), re.DOTALL)
    script = f"""{snippet}
    import psutil
    children = psutil.Process().children(recursive=True)
    print("", len(children), sep="\\n")
print([child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("One, two, ['")
    *_, count, left = done.stdout.splitlines()
    assert (count, left) == ("5", "[]")


@pytest.mark.slow
def test_a_script_that_is_killed_leaves_nothing_behind():
    script = f"from services.client import LLM; llm = LLM(**{FLAGS!r}); print('ready', flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        children = descendants(process.pid)
        roles = [part for child in children for part in child.cmdline() if part.startswith("services.")]
        assert sorted(roles) == ["services.launcher.toka", "services.scheduler", "services.worker"]
        process.kill()
        process.wait()
        eventually(lambda: gone(children))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"modle": "x"}, "did you mean model"), ({"page_size": 0}, "page_size"), ({"gateways": 2}, "gateways=2"),
        ({"port": 7000}, "no effect with gateways=0"), ({"worker_listen": "x"}, "leave it out"),
    ],
)  # fmt: skip
def test_a_wrong_flag_is_named_before_anything_is_started(flags, words):
    before = engine_processes()
    with pytest.raises(InvalidRequest, match=words):
        LLM(**flags)
    assert engine_processes() == before


def test_an_engine_that_cannot_start_says_why(tmp_path, capfd):
    (tmp_path / "config.json").write_text('{"vocab_size": 10, "architectures": ["NoSuchModel"]}')
    before = engine_processes()
    with pytest.raises(Unavailable, match=r"has neither tokenizer\.json"):
        LLM(str(tmp_path), device="cpu")
    assert engine_processes() == before
    assert "has neither tokenizer.json" in capfd.readouterr().err
