"""Measure the latency of one key's chats while other keys load the engine: ``python -m bench.fairness [worker=real]``.

Busy keys send completions of 32 prompts of 400 tokens, each after the previous one has finished, so that at least 256
prompts are in progress at all times. Another key sends chats with answers of 4 tokens. Figures by number of busy keys:

* the latency of a chat, alone and under load, and the parts of it that the scheduler reports;
* the longest of the usual steps, since a new request waits for the current step;
* tokens per second of the busy keys without chats, measured in turns with a single key that sends the same load.

The limits: a median chat takes at most 3 times its time alone, and one step. Several busy keys have at least 95 % of
the throughput of a single key, shortly after another key was active. The exit status is 1 if a limit is missed. The
last line is one JSON object.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.server import report, serve
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int, Ints
from tests.gateway.deployment import Deployment

_TIMEOUT_S = 600.0
_FIRST_TOKEN, _VOCAB_SIZE = 261, 2048  # of the built-in model: below are special tokens and single bytes
_MOST_RATIO, _LEAST_KEPT = 3.0, 0.95
_SETTLED_STEPS = 20
_METRICS = (
    "toka_step_tokens_total",
    "toka_recomputed_tokens_total",
    "toka_steps_total",
    "toka_yields_total",
    "toka_num_requests_running",
)


class FairnessConfig(Config):
    """The flags."""

    worker: Literal["fake", "real"] = Field("fake", description="real: the built-in model on this machine's CPU")
    url: str | None = Field(None, description="a running server; step_ms and token_us must be those of its worker")
    keys: Ints = Field((1, 10, 100), description="numbers of busy keys")
    chats: Int = Field(40, ge=5, description="chats to measure alone, and under each load")
    gap_ms: Float = Field(150.0, ge=0, description="time from one chat to the next")
    prompts: Int = Field(32, ge=1, description="prompts of one completion")
    completions: Int = Field(8, ge=1, description="completions in progress, at least one for each key")
    prompt_tokens: Int = Field(400, ge=1)
    output_tokens: Int = Field(64, ge=1, description="tokens of each answer")
    text: bool = Field(False, description="send prompts as text, which the gateway tokenises")
    seconds: Float = Field(15.0, gt=0, description="duration of each measurement of throughput")
    step_ms: Float = Field(5.0, gt=0, description="fixed time of a step of the fake worker")
    token_us: Float = Field(80.0, ge=0, description="time of each token of a step of the fake worker")


class Bench:
    """A client of a running server."""

    def __init__(self, config: FairnessConfig, url: str) -> None:
        self._config = config
        self._url = url
        self._rng = np.random.default_rng(7)
        self._client = httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S, limits=httpx.Limits(max_connections=None))
        self._model = ""

    async def run(self) -> dict[str, Any]:
        async with self._client:
            self._model = (await self._client.get(f"{self._url}/v1/models")).json()["data"][0]["id"]
            await self._chats(5)
            figures: dict[str, Any] = {"alone": _figures(await self._chats(self._config.chats))}
            for keys in self._config.keys:
                figures[str(keys)] = await self._beside(keys)
        return figures

    async def _beside(self, keys: int) -> dict[str, Any]:
        async with self._load(1):
            single, step_ms = await self._throughput()
        async with self._load(keys):
            before = await self._metrics()
            chats = await self._chats(self._config.chats)
            yields = (await self._metrics())["toka_yields_total"] - before["toka_yields_total"]
            several, several_ms = await self._throughput()  # the other key was there a moment ago
        return _figures(chats) | {
            "yields": yields,
            "step_ms": step_ms,
            "step_ms_of_all": several_ms,
            "tokens_per_second_of_one_key": single,
            "tokens_per_second": several,
        }

    # -- the other key

    async def _chats(self, count: int) -> list[dict[str, float]]:
        """Send chats one after the other. Return the milliseconds of each, in total and by part of the scheduler."""
        found = []
        for _ in range(count):
            await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._config.gap_ms / 1000)
            body = {
                "model": self._model,
                "messages": [{"role": "user", "content": f"Hello {self._rng.integers(10**9)}"}],
                "max_tokens": 4,
                "ignore_eos": True,
            }
            sent = time.perf_counter()
            answer = await self._client.post(f"{self._url}/v1/chat/completions", json=body, headers=_key("chat"))
            took_ms = 1000 * (time.perf_counter() - sent)
            timing = answer.raise_for_status().json()["usage"]["timing"]
            found.append({"latency_ms": took_ms, "elsewhere_ms": took_ms - sum(timing.values()), **timing})
        return found

    # -- the busy keys

    @asynccontextmanager
    async def _load(self, keys: int) -> AsyncIterator[None]:
        """Keep ``keys`` keys busy."""
        each = max(1, self._config.completions // keys)
        tasks = [asyncio.create_task(self._busy(number)) for number in range(keys) for _ in range(each)]
        try:
            await self._settle(tasks)
            yield
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            while True:
                if not (await self._metrics())["toka_num_requests_running"]:
                    break
                await asyncio.sleep(0.1)

    async def _settle(self, tasks: list[asyncio.Task[None]]) -> None:
        """Wait until the server is fully loaded, or for some steps."""
        before = (await self._metrics())["toka_steps_total"]
        while (await self._metrics())["toka_steps_total"] < before + _SETTLED_STEPS:
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.1)

    async def _busy(self, number: int) -> None:
        while True:
            body = {
                "model": self._model,
                "prompt": [self._prompt() for _ in range(self._config.prompts)],
                "max_tokens": self._config.output_tokens,
                "ignore_eos": True,
            }
            url = f"{self._url}/v1/completions"
            (await self._client.post(url, json=body, headers=_key(f"busy-{number}"))).raise_for_status()

    def _prompt(self) -> list[int] | str:
        ids = self._rng.integers(_FIRST_TOKEN, _VOCAB_SIZE, self._config.prompt_tokens)
        return " ".join(map(str, ids)) if self._config.text else ids.tolist()

    async def _throughput(self) -> tuple[float, float]:
        """Return the computed tokens per second, without recomputed ones, and the milliseconds of a step."""
        begun, before = time.perf_counter(), await self._metrics()
        await asyncio.sleep(self._config.seconds)
        took_s, after = time.perf_counter() - begun, await self._metrics()
        done = {name: after[name] - before[name] for name in after}
        tokens = done["toka_step_tokens_total"] - done["toka_recomputed_tokens_total"]
        return tokens / took_s, 1000 * took_s / max(1.0, done["toka_steps_total"])

    async def _metrics(self) -> dict[str, float]:
        found = dict.fromkeys(_METRICS, 0.0)
        for line in (await self._client.get(f"{self._url}/metrics")).text.splitlines():
            name = line.split("{")[0].split(" ")[0]
            if name in found:
                found[name] += float(line.rsplit(" ", 1)[1])
        return found


def _key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def _figures(chats: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians, and the 95th percentile of the latency."""
    figures = {name: statistics.median(chat[name] for chat in chats) for name in chats[0]}
    return figures | {"latency_p95_ms": float(np.percentile([chat["latency_ms"] for chat in chats], 95))}


@contextmanager
def _server(config: FairnessConfig) -> Iterator[str]:
    """Yield the URL of the server that is measured."""
    with tempfile.TemporaryDirectory() as directory:
        if config.url is not None:
            yield config.url.rstrip("/")
        elif config.worker == "real":
            with serve(device="cpu", model="builtin", store_dir=f"{directory}/store") as running:
                yield running.base_url
        else:
            shape = {
                "max_slots": 256,
                "page_count": 8192,
                "max_tokens_per_step": 2048,
                "step_ms": config.step_ms,
                "token_us": config.token_us,
            }
            deployment = Deployment(Path(directory), worker=shape).wait_ready()
            try:
                yield deployment.url
            finally:
                deployment.stop()


def judge(figures: dict[str, Any], keys: Sequence[int]) -> list[str]:
    """Return the bars that were missed, in sentences."""
    missed, alone = [], figures["alone"]["latency_ms"]
    for each in map(str, keys):
        found = figures[each]
        allowed = _MOST_RATIO * alone + found["step_ms"]
        if found["latency_ms"] > allowed:
            missed.append(f"{each} busy keys: a chat takes {found['latency_ms']:.0f} ms; the bar is {allowed:.0f} ms")
        kept = found["tokens_per_second"] / found["tokens_per_second_of_one_key"]
        if kept < _LEAST_KEPT:
            missed.append(f"{each} busy keys keep {kept:.1%} of the throughput of one; the bar is {_LEAST_KEPT:.0%}")
    return missed


def main() -> None:
    config = from_command_line(FairnessConfig)
    with _server(config) as url:
        figures: dict[str, Any] = asyncio.run(Bench(config, url).run())
    table = Table(title="A chat of another key, in milliseconds; medians")
    names = list(figures[str(config.keys[0])])
    for column in ("", "alone", *(f"{keys} busy" for keys in config.keys)):
        table.add_column(column, justify="right" if column else "left")
    for name in names:
        parts = [figures["alone"].get(name), *(figures[str(keys)][name] for keys in config.keys)]
        table.add_row(name, *("" if part is None else f"{part:.1f}" for part in parts))
    Console().print(table)
    figures["missed"] = judge(figures, config.keys)
    for sentence in figures["missed"]:
        print(sentence)
    report(figures)
    if figures["missed"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
