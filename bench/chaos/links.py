"""Damage the bytes on each link: ``python -m bench.chaos.links [links=...] [faults=...] [seconds=1,10]``.

Runs a deployment for each link, which goes through ``bench.chaos.proxy``: client and gateway, gateway and scheduler,
scheduler and worker. With ``links=gateway-store store_url=postgresql://user@host/database``, the link of the
gateway to PostgreSQL (SQLite is a file, which has no link). While requests with known answers run, the proxy damages
the link for each number of ``seconds`` and heals it. ``ready_s`` is the time from then until a request is answered
correctly again.

The last line is one JSON object. Exit status 1 if a request neither ended within its deadline nor was answered
correctly, or if a link was not ready again within 15 s. Links are plain text here: a wrong answer counts for faults
that keep or end all bytes, and is only reported for faults that change them, which TLS alone can detect.
"""

import asyncio
import contextlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import httpx
from pydantic import Field, field_validator, model_validator
from rich.console import Console
from rich.table import Table
from sqlalchemy.engine import make_url

from bench.chaos.proxy import FAULTS, SILENT, Fault, Proxy
from bench.server import free_port, run_kept
from services.common.config import from_command_line
from services.common.flags import Config, Int, Ints, Strings
from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeShape, continuation
from tests.gateway.deployment import Deployment, Process

LINKS = ("client-gateway", "gateway-scheduler", "scheduler-worker")
STORE = "gateway-store"
READY_S = 15.0
_GIVE_UP_S = 120.0
_DEADLINE_S = 60.0  # of one request
_POSTGRESQL_PORT = 5432
_PROMPT, _TOKENS = list(range(50, 90)), 40


class LinksConfig(Config):
    """The flags."""

    links: Strings = Field(LINKS, min_length=1)
    faults: Strings = Field(FAULTS, min_length=1)
    seconds: Ints = Field((1, 10), min_length=1, description="durations of each fault")
    store_url: str | None = Field(None, description=f"a PostgreSQL database for tests, for the link {STORE}")
    clients: Int = Field(4, ge=1, description="clients for each link, which send one request after the other")
    seed: Int = Field(1, description="seed of the damage")
    directory: str | None = Field(None, description="directory for logs; default: a temporary one")

    @field_validator("links", "faults")
    @classmethod
    def _exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in (*LINKS, STORE, *FAULTS):
                raise ValueError(f"{name!r} is none of {', '.join((*LINKS, STORE, *FAULTS))}")
        return names

    @model_validator(mode="after")
    def _has_a_store(self) -> Self:
        if STORE in self.links and self.store_url is None:
            raise ValueError(f"links={STORE} needs store_url=, a PostgreSQL database for tests")
        return self


class Link:
    """A deployment with a proxy in one of its links."""

    def __init__(self, name: str, deployment: Deployment, url: str, proxy: Proxy, http: httpx.AsyncClient) -> None:
        self.name, self.proxy = name, proxy
        self.deployment = deployment
        self._url, self._http = url, http
        self._seeds = itertools.count(1)
        self._tokenizer = Tokenizer.load("builtin")

    async def ask(self) -> str:
        """Return the outcome of a request: right, wrong, error or hang."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                return await (self._ask_for_a_stored_response() if self.name == STORE else self._ask())
        except TimeoutError:
            return "hang"
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            return "error"

    async def _ask(self) -> str:
        seed = next(self._seeds)
        body = {"prompt": _PROMPT, "max_tokens": _TOKENS, "temperature": 1.0, "seed": seed, "ignore_eos": True}
        response = await self._http.post(f"{self._url}/v1/completions", json=body)
        if response.status_code != httpx.codes.OK:
            return "error"
        right = self._tokenizer.decode(continuation(FakeShape(), _PROMPT, _TOKENS, seed=seed))
        return "right" if response.json()["choices"][0]["text"] == right else "wrong"

    async def _ask_for_a_stored_response(self) -> str:
        """Store a response, and read it again."""
        url, number = f"{self._url}/v1/responses", next(self._seeds)
        made = await self._http.post(url, json={"input": f"number {number}", "max_output_tokens": _TOKENS})
        if made.status_code != httpx.codes.OK:
            return "error"
        read = await self._http.get(f"{url}/{made.json()['id']}")
        if read.status_code != httpx.codes.OK:
            return "error"
        return "right" if read.json()["output"] == made.json()["output"] else "wrong"

    async def suffer(self, fault: Fault, seconds: float, clients: int) -> dict[str, Any]:
        """Begin ``fault``, end it after ``seconds``, and measure."""
        ends: Counter[str] = Counter()
        over = False

        async def client() -> None:
            while not over:
                ends[await self.ask()] += 1
                await asyncio.sleep(0.05)

        asking = [asyncio.create_task(client()) for _ in range(clients)]
        async with self.proxy.struck(fault, seconds):
            pass
        healed, over = time.monotonic(), True
        ready_s = await self.seconds_until_right(healed)
        await asyncio.gather(*asking)
        return {"link": self.name, "fault": fault, "seconds": seconds, "ready_s": ready_s, **ends}

    async def seconds_until_right(self, begin: float) -> float | None:
        """Send requests until one is answered correctly.

        Requests run concurrently, since some may use a connection that is still broken. Returns the seconds since
        ``begin``, or None if there is no correct answer within ``_GIVE_UP_S``.
        """
        pending: set[asyncio.Task[str]] = set()
        try:
            while time.monotonic() < begin + _GIVE_UP_S:
                pending.add(asyncio.create_task(self.ask()))
                done, pending = await asyncio.wait(pending, timeout=0.25, return_when=asyncio.FIRST_COMPLETED)
                if any(each.result() == "right" for each in done):
                    return round(time.monotonic() - begin, 1)
        finally:
            for each in pending:
                each.cancel()
        return None


@contextlib.asynccontextmanager
async def proxied(name: str, directory: Path, config: LinksConfig) -> AsyncIterator[Link]:
    """Yield a deployment that has answered a request."""
    await asyncio.to_thread(directory.mkdir)
    proxy = Proxy("", config.seed)
    at = await proxy.start()
    worker = None
    if name == "scheduler-worker":
        proxy.target = f"127.0.0.1:{free_port()}"
        worker = Process(directory / "worker.log", "tests.fakes.worker", listen=proxy.target, step_ms=10)
        deployment = Deployment(directory, worker_address=at)
    elif name == "gateway-scheduler":
        deployment = Deployment(directory, worker={"step_ms": 10}, gateway={"scheduler_addresses": at})
        proxy.target = deployment.scheduler_address
    elif name == STORE:
        store, (host, port) = make_url(config.store_url), at.split(":")
        proxy.target = f"{store.host}:{store.port or _POSTGRESQL_PORT}"
        through = store.set(host=host, port=int(port)).render_as_string(hide_password=False)
        deployment = Deployment(directory, worker={"step_ms": 10}, gateway={"store_url": through})
    else:
        deployment = Deployment(directory, worker={"step_ms": 10})
        proxy.target = deployment.url.removeprefix("http://")
    url = f"http://{at}" if name == "client-gateway" else deployment.url
    try:
        await asyncio.to_thread(deployment.wait_ready)
        # Only the timeout of a client detects a connection that is open and carries no bytes.
        async with httpx.AsyncClient(timeout=5.0 if url != deployment.url else _DEADLINE_S) as http:
            link = Link(name, deployment, url, proxy, http)
            # A gateway is ready before its store is open.
            if await link.seconds_until_right(time.monotonic()) is None:
                raise RuntimeError(f"no request was answered correctly over the undamaged link {name}")
            yield link
    finally:
        for process in (deployment.gateway, deployment.scheduler, deployment.worker, worker):
            if process is not None:
                process.kill()
        await proxy.stop()


async def measure(config: LinksConfig, directory: Path) -> dict[str, Any]:
    async def trouble(name: str) -> list[dict[str, Any]]:
        async with proxied(name, directory / name, config) as link:
            found = []
            for fault, seconds in itertools.product(config.faults, config.seconds):
                figures = await link.suffer(fault, seconds, config.clients)  # type: ignore[arg-type]
                print(figures, flush=True)
                found.append(figures)
            ended = [
                process.log.name
                for process in (link.deployment.gateway, link.deployment.scheduler)
                if not process.running
            ]
            return [*found, *({"link": name, "ended": each} for each in ended)]

    return {"trials": list(itertools.chain(*await asyncio.gather(*map(trouble, config.links))))}


def is_right(figures: dict[str, Any]) -> bool:
    return not any(
        "ended" in trial
        or trial.get("hang")
        or trial["ready_s"] is None
        or trial["ready_s"] > READY_S
        or (trial.get("wrong") and trial["fault"] not in SILENT)
        for trial in figures["trials"]
    )


def draw(figures: dict[str, Any]) -> None:
    table = Table(title="seconds from the end of a fault until a request is answered correctly")
    columns = ("link", "fault", "seconds", "ready_s", "right", "error", "wrong", "hang")
    for column in columns:
        table.add_column(column)
    for trial in figures["trials"]:
        table.add_row(*(str(trial.get(column, 0)) for column in columns))
    Console().print(table)


def main() -> None:
    config = from_command_line(LinksConfig)
    run_kept("links", config.directory, lambda directory: asyncio.run(measure(config, directory)), draw, is_right)


if __name__ == "__main__":
    main()
