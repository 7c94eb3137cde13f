"""Upgrade one service at a time, beside services of the old revision: ``python -m bench.chaos.upgrade old=REVISION``.

Checks ``old``, a git revision, out into a temporary worktree and generates its stubs. A deployment of old services with
a fake worker is asked questions. Then each service in turn is ended by SIGTERM and started again from this worktree,
in four orders, which together make every mixture of old and new gateway, scheduler and worker. Requests run all the
time. Each must be answered as the old deployment answered it. While the gateway itself restarts they may fail.

The last line is one JSON object. Exit status 1 if an answer differed, if a request failed although its gateway ran, or
if a worker found a plan that broke the contract.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from pydantic import Field

from bench.server import free_port, run_kept
from services.common.config import from_command_line
from services.common.flags import Config
from tests.gateway.deployment import Process

_HERE = Path(__file__).parents[2]
_ORDERS = (("worker", "scheduler", "gateway"), ("gateway", "scheduler", "worker"),
           ("scheduler", "worker", "gateway"), ("gateway", "worker", "scheduler"))  # fmt: skip
_MODULES = {"gateway": "services.gateway", "scheduler": "services.scheduler", "worker": "tests.fakes.worker"}
_START_S = 120.0
_CLIENTS = 3
_PROMPT = list(range(50, 90))
_QUESTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 7, "n": 3},
    {"temperature": 1, "seed": 8, "logprobs": 2, "max_tokens": 20},
    {"temperature": 0.5, "seed": 9, "stop": ["e", "zz"]},
    {"temperature": 1, "seed": 10, "logit_bias": {"100": 5}, "frequency_penalty": 0.5},
)


class UpgradeConfig(Config):
    """The flags."""

    old: str = Field(description="git revision before the upgrade")
    directory: str | None = Field(None, description="directory for logs; default: a temporary one")


class Services:
    """A gateway, a scheduler and a worker, each of its own revision. Owned by the event loop."""

    def __init__(self, directory: Path, tree: Path) -> None:
        directory.mkdir(parents=True)
        worker, scheduler, port = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}", free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._directory = directory
        self._flags: dict[str, dict[str, Any]] = {
            "worker": {"listen": worker, "step_ms": 5},
            "scheduler": {"scheduler_listen": scheduler, "worker_addresses": worker, "drain_seconds": 5},
            "gateway": {"port": port, "scheduler_addresses": scheduler, "store_dir": directory / "store"},
        }
        self._processes = {role: self._start(role, tree) for role in _MODULES}

    async def replace(self, role: str, tree: Path) -> None:
        """End the service, and start that of ``tree`` in its place."""
        await asyncio.to_thread(self._processes[role].stop)
        self._processes[role] = self._start(role, tree)

    def stop(self) -> None:
        for role in reversed(_MODULES):
            self._processes[role].stop()

    def _start(self, role: str, tree: Path) -> Process:
        within = ("env", "-C", str(tree), f"PYTHONPATH={tree}:{tree / 'protos'}")
        return Process(self._directory / f"{role}.log", _MODULES[role], within=within, **self._flags[role])


async def ask(http: httpx.AsyncClient, url: str, question: dict[str, Any]) -> Any:
    """Return the comparable part of an answer, or the reason of an error as a string."""
    try:
        response = await http.post(f"{url}/v1/completions", json={"prompt": _PROMPT, "max_tokens": 40} | question)
    except httpx.TransportError as error:
        return repr(error)
    if response.status_code != httpx.codes.OK:
        return response.text
    body = response.json()
    choices = [(each["text"], each["finish_reason"], each["logprobs"]) for each in body["choices"]]
    return [choices, body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]]


async def answers(http: httpx.AsyncClient, url: str) -> list[Any]:
    """Ask all questions until each has an answer, and return the answers."""
    async with asyncio.timeout(_START_S):
        while True:
            found = [await ask(http, url, question) for question in _QUESTIONS]
            if not any(isinstance(answer, str) for answer in found):
                return found
            await asyncio.sleep(0.2)


async def walk(order: tuple[str, ...], old: Path, directory: Path) -> dict[str, Any]:
    """Upgrade in ``order``, under load. Returns counts, and the first ``problems``."""
    services = Services(directory, old)
    counts: Counter[str] = Counter()
    problems: list[str] = []
    mixture = dict.fromkeys(_MODULES, "old")
    gateway_away = over = False
    try:
        async with httpx.AsyncClient(timeout=_START_S) as http:
            right = await answers(http, services.url)

            async def client(number: int) -> None:
                while not over:
                    number = (number + 1) % len(_QUESTIONS)
                    excused = gateway_away
                    answer = await ask(http, services.url, _QUESTIONS[number])
                    if answer == right[number]:
                        counts["right"] += 1
                    elif isinstance(answer, str) and (excused or gateway_away):
                        counts["without a gateway"] += 1
                        await asyncio.sleep(0.2)
                    else:
                        counts["failed" if isinstance(answer, str) else "wrong"] += 1
                        problems.append(f"{mixture}: {_QUESTIONS[number]}: {str(answer)[:300]}")
                        await asyncio.sleep(0.2)

            clients = [asyncio.create_task(client(number)) for number in range(_CLIENTS)]
            for role in order:
                gateway_away, mixture[role] = role == "gateway", "new"
                await services.replace(role, _HERE)
                if await answers(http, services.url) != right:
                    problems.append(f"{mixture}: answers differ")
                gateway_away = False
            over = True
            await asyncio.gather(*clients)
    finally:
        await asyncio.to_thread(services.stop)
    log = await asyncio.to_thread((directory / "worker.log").read_text)
    problems += [line for line in log.splitlines() if line.startswith("violations:")]
    return {"order": ", ".join(order), **counts, "problems": problems[:10]}


@contextlib.contextmanager
def checked_out(revision: str, directory: Path) -> Iterator[Path]:
    """A worktree of ``revision`` with generated stubs, removed at the end."""
    tree = directory / "old"
    subprocess.run(("git", "-C", _HERE, "worktree", "add", "--detach", tree, revision), check=True, capture_output=True)
    try:
        subprocess.run((sys.executable, "protos/generate.py"), check=True, cwd=tree, capture_output=True)
        yield tree
    finally:
        subprocess.run(("git", "-C", _HERE, "worktree", "remove", "--force", tree), check=True, capture_output=True)


def measure(config: UpgradeConfig, directory: Path) -> dict[str, Any]:
    with checked_out(config.old, directory.resolve()) as old:
        walks = [asyncio.run(walk(order, old, directory / "-".join(order))) for order in _ORDERS]
    return {"old": config.old, "walks": walks}


def draw(figures: dict[str, Any]) -> None:
    for each in figures["walks"]:
        print(each)


def is_right(figures: dict[str, Any]) -> bool:
    return not any(each["problems"] for each in figures["walks"])


def main() -> None:
    config = from_command_line(UpgradeConfig)
    run_kept("upgrade", config.directory, lambda directory: measure(config, directory), draw, is_right)


if __name__ == "__main__":
    main()
