"""Kill services during a Batch job: ``python -m bench.batch_kills [lines=50000 kills=10 gateways=2 store=sqlite]``.

Runs gateways that share a store, a scheduler and a worker, each as a process. A Batch job runs without faults. Then it
runs again while one process after the other is killed by SIGKILL and restarted at once. Afterwards the output must
have every ``custom_id`` exactly once, with the same text as without faults. Lines are greedy, so a line that runs again
has the same text. The memory of gateways is measured; ``line_bytes=5000`` makes a large file. The last line is one JSON
object. The exit status is 1 if a line is missing, repeated or different.
"""

import io
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from openai import APIConnectionError, APIStatusError, OpenAI
from openai.types import Batch
from pydantic import Field

from bench.memory import PeakMemory
from bench.server import free_port, report
from services.common.config import from_command_line
from services.common.flags import Bool, Config, Int
from tests.gateway.deployment import Deployment, Process, eventually

_POLL_S = 0.2
_ENDED = ("completed", "failed", "expired", "cancelled")
_STORY = "Over one more hill they went, and past one more river. "
_NAMES = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus")


class KillsConfig(Config):
    """The flags."""

    lines: Int = Field(50_000, ge=1)
    kills: Int = Field(10, ge=0)
    gateways: Int = Field(2, ge=1)
    store: str = Field("sqlite", description="sqlite, or the SQLAlchemy URL of an empty database, such as PostgreSQL's")
    worker: Literal["fake", "real"] = Field("fake", description="real: the built-in model on this machine's CPU")
    max_tokens: Int = Field(9, ge=1, description="tokens of the longest answer")
    line_bytes: Int = Field(0, ge=0, le=6000, description="length of a line; shorter ones get a longer prompt")
    concurrency: Int = Field(512, ge=1, description="batch_concurrency of each gateway")
    compare: Bool = Field(True, description="first run without faults, and compare texts")
    seed: Int = Field(1, description="seed of the order in which processes are killed")


class Fleet:
    """A deployment and further gateways on the same store. Each process may be killed and restarted."""

    def __init__(self, config: KillsConfig, directory: Path) -> None:
        url = f"sqlite:///{directory}/batches.db" if config.store == "sqlite" else config.store
        shared = {"store_url": url, "store_dir": directory / "store", "batch_concurrency": config.concurrency}
        worker, address = None, None
        if config.worker == "real":
            address = f"127.0.0.1:{free_port()}"
            # Texts are compared: in float32, other rows of a batch do not change the answer to a line.
            worker = Process(directory / "worker.log", "services.worker", worker_listen=address, device="cpu",
                             dtype="float32", kv_cache_num_tokens=64 * 1024)  # fmt: skip
        self.deployment = Deployment(
            directory,
            worker={"page_count": 16384, "max_tokens_per_step": 4096},
            worker_address=address,
            gateway=shared,
        )
        self._worker = worker or self.deployment.worker
        self._urls, self._gateways = [self.deployment.url], [self.deployment.gateway]
        for number in range(1, config.gateways):
            port = free_port()
            flags = shared | {"port": port, "scheduler_addresses": self.deployment.scheduler_address}
            self._gateways.append(Process(directory / f"gateway{number}.log", "services.gateway", **flags))
            self._urls.append(f"http://127.0.0.1:{port}")

    def wait_ready(self) -> None:
        eventually(lambda: all(self._is_ready(url) for url in self._urls))

    def _is_ready(self, url: str) -> bool:
        try:
            return httpx.get(f"{url}/ready", trust_env=False, timeout=10).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def gateway_pids(self) -> list[int]:
        return [gateway.pid for gateway in self._gateways]

    def victims(self) -> dict[str, list[Process]]:
        return {"gateway": self._gateways, "scheduler": [self.deployment.scheduler], "worker": [self._worker]}

    def ask(self, question: Callable[[OpenAI], Any]) -> Any:
        """Ask the gateways in turn until one answers, and return its answer."""
        answer = []

        def answered() -> bool:
            for url in self._urls:
                with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as sdk:
                    try:
                        answer.append(question(sdk))
                        return True
                    except (APIConnectionError, APIStatusError):  # the gateway is starting, or was just killed
                        pass
            return False

        eventually(answered)
        return answer[0]

    def stop(self) -> None:
        for gateway in self._gateways[1:]:
            gateway.stop()
        self.deployment.stop()
        self._worker.stop()


@contextmanager
def fleet(config: KillsConfig) -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory() as directory:
        running = Fleet(config, Path(directory))
        try:
            running.wait_ready()
            yield running
        finally:
            running.stop()


def line(number: int, most: int, length: int) -> str:
    """Return the request of line ``number``, in at least ``length`` characters. Many prompts share a prefix."""
    name = _NAMES[number % len(_NAMES)]
    prompt = f"{name} counts sheep on a long way home through the hills. {name} begins at {number} and goes on:"
    body = {"model": "tokasaurus-builtin", "prompt": prompt, "temperature": 0, "max_tokens": 1 + number % most}
    request = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
    lacking = max(0, length - len(json.dumps(request)))
    body["prompt"] = (_STORY * (lacking // len(_STORY) + 1))[:lacking] + prompt
    return json.dumps(request)


def begin(running: Fleet, content: bytes) -> Batch:
    """Create a Batch job of the file ``content``."""
    file = running.ask(lambda sdk: sdk.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch"))
    return running.ask(
        lambda sdk: sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    )


def follow(running: Fleet, batch: Batch, kills: int, seed: int) -> tuple[Batch, Counter]:
    """Wait until ``batch`` has ended, and kill ``kills`` processes meanwhile, spread evenly over its lines.

    The kinds of processes take turns. Also return the number of kills of each kind.
    """
    chance, killed, total, name = random.Random(seed), Counter(), 0, batch.id
    turn: list[str] = []
    while True:
        batch = running.ask(lambda sdk: sdk.batches.retrieve(name))
        if batch.status in _ENDED:
            return batch, killed
        counts = batch.request_counts
        if total < kills and counts.total and counts.completed >= counts.total * total / (kills + 1):
            if not turn:
                turn = chance.sample(sorted(running.victims()), 3)
            kind = turn.pop()
            victim = chance.choice(running.victims()[kind])
            victim.kill()
            victim.start()
            killed[kind] += 1
            total += 1
        else:
            time.sleep(_POLL_S)


def read(running: Fleet, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of an output or error file."""
    if file_id is None:
        return []
    content = running.ask(lambda sdk: sdk.files.content(file_id).content)
    return [json.loads(text) for text in content.splitlines()]


def text(answer: dict[str, Any]) -> str:
    return answer["response"]["body"]["choices"][0]["text"]


def measure(config: KillsConfig) -> dict[str, Any]:
    lines = (line(number, config.max_tokens, config.line_bytes) for number in range(config.lines))
    content = "\n".join(lines).encode()
    expected, figures = {}, {}
    with fleet(config) as running, PeakMemory(running.gateway_pids) as memory:
        idle = memory.megabytes
        if config.compare:
            began = time.monotonic()
            peaceful, _ = follow(running, begin(running, content), 0, config.seed)
            figures["seconds_in_peace"] = round(time.monotonic() - began, 1)
            expected = {answer["custom_id"]: text(answer) for answer in read(running, peaceful.output_file_id)}
        began = time.monotonic()
        batch, killed = follow(running, begin(running, content), config.kills, config.seed)
        seconds = time.monotonic() - began
        answers, errors = read(running, batch.output_file_id), read(running, batch.error_file_id)
    counts = Counter(answer["custom_id"] for answer in answers + errors)
    figures |= {
        "lines": config.lines,
        "status": batch.status,
        "gateways": config.gateways,
        "store": config.store.partition(":")[0],
        "worker": config.worker,
        "killed": dict(killed),
        "seconds": round(seconds, 1),
        "lines_per_second": round(config.lines / seconds),
        "file_mb": len(content) // 10**6,
        "gateway_mb": {"idle": idle, "most": memory.megabytes},
        "answered": len(answers),
        "failed": len(errors),
        "missing": config.lines - len(counts),
        "twice": sum(count > 1 for count in counts.values()),
        "in_order": [answer["custom_id"] for answer in answers] == [f"r{n}" for n in range(config.lines)],
    }
    if config.compare:
        figures["different"] = sum(text(answer) != expected.get(answer["custom_id"]) for answer in answers)
    return figures


def is_right(figures: dict[str, Any]) -> bool:
    wrong = sum(figures.get(name, 0) for name in ("failed", "missing", "twice", "different"))
    return figures["status"] == "completed" and figures["in_order"] and not wrong


def main() -> None:
    figures = measure(from_command_line(KillsConfig))
    report(figures)
    if not is_right(figures):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
