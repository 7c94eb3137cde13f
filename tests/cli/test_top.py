"""toka-top in front of real gateways: what it shows is what they say."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from rich.console import Console

from bench.server import free_port
from services.cli.top.command import main
from services.cli.top.figures import History
from services.cli.top.source import Snapshot
from services.cli.top.view import duration, frame, resample, unavailable
from tests.cli.running import Outcome, run
from tests.gateway.access.conftest import KeysFile
from tests.gateway.deployment import PATIENCE_S, Deployment, Process, eventually

PROGRAM = [sys.executable, "-m", "services.cli.top"]


@pytest.fixture(scope="module")
def nobody() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def watched(tmp_path_factory, nobody):
    directory = tmp_path_factory.mktemp("watched")
    running = Deployment(directory, worker={"step_ms": 50}, other_schedulers=(nobody,)).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def guarded(watched, tmp_path_factory):
    """A second gateway, with keys and a port for operators."""
    directory = tmp_path_factory.mktemp("guarded")
    keys, port, admin = KeysFile(directory / "keys.toml"), free_port(), free_port()
    gateway = Process(
        directory / "gateway.log", "services.gateway", port=port, scheduler_addresses=watched.scheduler_address,
        api_keys_file=keys.path, admin_port=admin, store_url="none",
    )  # fmt: skip
    urls = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{admin}"
    eventually(lambda: answers(urls[1] + "/ready"))
    yield keys, *urls
    gateway.stop()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def top(*arguments: str, **environment: str) -> Outcome:
    """The command in this process, its output in a pipe."""
    plain = {"TOKA_API_KEY": None, "OPENAI_API_KEY": None, "COLUMNS": "200"}
    return run(main, "--interval", "0.5", *arguments, environment=plain | environment)


@pytest.mark.slow
def test_a_frame_has_what_the_gateway_says(watched, nobody):
    asked = {"prompt": "a b c", "max_tokens": 400, "n": 4, "ignore_eos": True}

    def running() -> bool:
        replicas = httpx.get(watched.url + "/console/state", timeout=PATIENCE_S).json()["replicas"]
        return sum(each["load"]["running_sequences"] for each in replicas if each["load"]) == 4

    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(watched.complete, **asked)
        eventually(running)
        done = top("--url", watched.url + "/v1")
        response = answer.result()
    assert response.status_code == 200
    assert done.status == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "tokasaurus-builtin  ready" in lines[0]
    assert 0 < float(re.search(r"generated ([\d,]+) tokens/s", done.stdout)[1].replace(",", "")) <= 4 * 1000 / 50 * 2
    [replica] = [line for line in lines if line.startswith(watched.scheduler_address)]
    assert re.search(r"ready +4 +0 +\S+ \d+%", replica)
    [absent] = [line for line in lines if line.startswith(nobody)]
    assert "failed to connect" in absent
    assert re.search(r"forecast +\S+ [▁▂▃▄▅▆▇█]+ +highest \d+%", done.stdout)
    [request] = [line for line in lines if line.startswith(response.json()["id"])]
    assert "normal" in request


@pytest.mark.slow
def test_a_gateway_that_is_away_comes_back_by_itself(watched, tmp_path):
    port = free_port()
    flags = {"port": port, "scheduler_addresses": watched.scheduler_address, "store_url": "none"}
    with contextlib.ExitStack() as opened:
        screen = opened.enter_context(Screen(f"http://127.0.0.1:{port}"))
        screen.wait_for("away for .*is toka running there")
        gateway = Process(tmp_path / "gateway.log", "services.gateway", **flags)
        opened.callback(gateway.stop)
        screen.wait_for("tokasaurus-builtin.*ready.*no requests")
        gateway.kill()
        screen.wait_for("away for")
        gateway.start()
        screen.wait_for("tokasaurus-builtin.*ready")
        assert screen.interrupt() == 0


def _heed_interrupts() -> None:
    """Tests that run in the background ignore them, and what they start inherits that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Screen:
    """The program on a terminal."""

    def __init__(self, url: str) -> None:
        ours, its = pty.openpty()
        environment = dict(os.environ) | {"TERM": "xterm", "COLUMNS": "160", "LINES": "50"}
        command = [*PROGRAM, "--url", url, "--interval", "0.5"]
        self._process = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, env=environment, preexec_fn=_heed_interrupts
        )
        os.close(its)
        self._seen, self._terminal = "", ours
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._reading.join(PATIENCE_S)
        os.close(self._terminal)

    def wait_for(self, pattern: str) -> None:
        """It is shown, after what was waited for before."""

        def shown() -> bool:
            found = re.search(pattern, self._seen, re.DOTALL)
            if found:
                self._seen = self._seen[found.end() :]
            return bool(found)

        eventually(lambda: shown() or self._process.poll() is not None)
        assert self._process.poll() is None, self._seen

    def interrupt(self) -> int:
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(PATIENCE_S)

    def _read(self) -> None:
        try:
            while piece := os.read(self._terminal, 65536):
                self._seen += re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", piece.decode(errors="replace"))
        except OSError:
            pass  # its other end is closed


def test_who_may_not_look_is_told_what_is_needed(guarded):
    keys, url, admin_url = guarded
    for key, sentence in (
        ({}, "requires an API key: give --api-key, or set TOKA_API_KEY"),
        ({"TOKA_API_KEY": keys.keys["team"]}, "use a key with the scope admin"),
        ({"OPENAI_API_KEY": keys.keys["boss"]}, "if admin_port= is set, use that port"),
    ):
        done = top("--url", url, **key)
        assert done.status == 1
        assert sentence in done.stderr
    done = top("--url", admin_url)
    assert done.status == 0, done.stderr
    assert "tokasaurus-builtin  ready" in done.stdout


def test_what_is_no_gateway_is_told(tmp_path):
    for arguments, sentence in (
        (("--url", "127.0.0.1:10210"), "expected http://HOST:PORT"),
        (("--ca", str(tmp_path / "nothing.pem")), "No such file"),
        (("--url", f"http://127.0.0.1:{free_port()}"), "is toka running there?"),
    ):
        done = top(*arguments)
        assert done.status == 1
        assert sentence in done.stderr


def sample(at: float, generated: float, finished: float = 0, counts: dict[float, float] | None = None) -> Snapshot:
    counters = {"generated_tokens": generated, "prompt_tokens": 2 * generated, "cached_prompt_tokens": generated}
    replicas = [{"address": "a", "load": {"counters": counters}}, {"address": "b", "load": None}]
    return Snapshot({"at": at, "replicas": replicas}, finished, {"first token": counts or {}})


def test_rates_are_between_two_looks_and_a_restart_is_no_fall():
    history = History()
    history.take(sample(100, 1000, 10))
    assert history.rates is None
    for _ in range(2):  # what was told already changes nothing
        history.take(sample(102, 1500, 12))
        assert (history.rates.generated, history.rates.prompt, history.rates.finished) == (250, 500, 1)
    history.take(sample(104, 20, 0))
    assert (history.rates.generated, history.rates.finished) == (0, 0)
    assert list(history.generated) == [250, 0]
    history.forget()
    history.take(sample(200, 5000))
    assert history.rates is None


def test_quantiles_are_of_what_was_observed_since():
    history = History()
    old = {0.1: 900.0, 1.0: 1000.0, float("inf"): 1000.0}
    new = {0.1: 910.0, 1.0: 1090.0, float("inf"): 1100.0}
    history.take(sample(0, 0, 0, old))
    history.take(sample(1, 0, 0, new))
    assert history.quantiles == {"first token": (1.0, float("inf"))}
    history.take(sample(2, 0, 0, new))
    assert history.quantiles == {"first token": (1.0, float("inf"))}


def test_a_curve_keeps_its_highest_point_whatever_its_length():
    assert resample([0, 1, 2, 3], [1, 9, 2, 0], 4) == [1, 9, 2, 0]
    assert resample([0, 50, 51, 99], [10, 70, 10, 0], 10) == [10, 10, 10, 10, 10, 70, 10, 10, 10, 10]
    assert resample([0], [5], 3) == [5, 0, 0]


def test_what_clients_call_their_requests_is_shown_as_it_is():
    """They choose the ids, and must not draw on an operator's terminal."""
    request = {
        "id": "[/red]\x1b[2J[bold]", "key": "", "priority": "normal", "age_s": 1.0, "prompt_tokens": 1, "running": 1,
        "waiting": 0, "finished": 0, "generated_tokens": 1, "finish_s": None,
    }  # fmt: skip
    schedule = {"unfinished_requests": 1, "requests": [request]}
    replica = {"address": "a", "model": "m", "ready": False, "reason": "[/]", "load": None, "schedule": schedule}
    gateway = {"draining": False, "ready": True}
    console = Console(file=io.StringIO(), width=200)
    state = {"at": 0.0, "gateway": gateway, "replicas": [replica]}
    console.print(frame("http://[fe80::1]:1", Snapshot(state, 0), History(), 10))
    console.print(unavailable("http://[fe80::1]:1", "[/]", 1.0))
    shown = console.file.getvalue()
    assert "[/red]\N{REPLACEMENT CHARACTER}[2J[bold]" in shown
    assert shown.count("http://[fe80::1]:1") == 2
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "12.3 ms"), (3.44, "3.44 s"), (125, "2:05"), (3725, "1:02:05"), (float("inf"), "∞")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text
