"""Measure the latency of online requests during a Batch job: ``python -m bench.online_beside_batch [worker=fake]``.

Sends streamed requests at a constant rate to a new server, first alone, and then while a Batch job occupies every slot
and has more lines in the queue. The time to first token begins with the request. The time per token is the time from
the first text to the last, over the tokens between them. Steps are the time to first token divided by the time per
token, which is about that of a step. The last line is one JSON object.
"""

import asyncio
import io
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
from openai import OpenAI
from pydantic import Field
from rich.console import Console
from rich.table import Table

from bench.server import Server, report, serve
from services.common.config import from_command_line
from services.common.flags import Config, Float, Int
from tests.gateway.deployment import Deployment, eventually

_TIMEOUT_S = 600.0
_FIRST_TOKEN = 261  # of the built-in model: before it are special tokens and single bytes
_VOCAB_SIZE = 2048


class BesideConfig(Config):
    """The flags."""

    worker: Literal["real", "fake"] = Field("real", description="real: the built-in model on this machine's CPU")
    slots: Int = Field(64, ge=1, description="max_seqs_per_forward: limit of running sequences")
    step_ms: Float = Field(10.0, ge=0, description="time of a step of the fake worker")
    requests: Int = Field(100, ge=10, description="online requests in each part")
    gap_ms: Float = Field(200.0, gt=0, description="time from one online request to the next")
    prompt_tokens: Int = Field(64, ge=1, description="prompt tokens of an online request")
    output_tokens: Int = Field(24, ge=2)
    line_prompt_tokens: Int = Field(64, ge=1, description="prompt tokens of a line of the Batch job")
    line_tokens: Int = Field(400, ge=2, description="mean tokens of the answers to lines, which vary by half")


class Beside:
    """A client of a running server."""

    def __init__(self, config: BesideConfig, server: Server | Deployment, url: str) -> None:
        self._config = config
        self._metric = server.metric
        self._url = url
        self._rng = np.random.default_rng(5)

    def trickle(self) -> dict[str, float]:
        """Send the online requests. Return medians and 99th percentiles in milliseconds."""
        times = asyncio.run(self._trickle())
        first, each = (np.array(column) * 1000 for column in zip(*times, strict=True))
        return {
            "first_token_ms": float(np.median(first)),
            "first_token_p99_ms": float(np.percentile(first, 99)),
            "per_token_ms": float(np.median(each)),
            "per_token_p99_ms": float(np.percentile(each, 99)),
        }

    async def _trickle(self) -> list[tuple[float, float]]:
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
            tasks = []
            for _ in range(self._config.requests):
                tasks.append(asyncio.create_task(self._ask(client)))
                await asyncio.sleep(self._config.gap_ms / 1000)
            return await asyncio.gather(*tasks)

    async def _ask(self, client: httpx.AsyncClient) -> tuple[float, float]:
        """Return the seconds to the first token, and those per later token."""
        config = self._config
        body = self._body(config.prompt_tokens, config.output_tokens) | {"stream": True}
        sent, arrivals = time.perf_counter(), []
        async with client.stream("POST", f"{self._url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    arrivals.append(time.perf_counter())
        return arrivals[0] - sent, (arrivals[-1] - arrivals[0]) / (config.output_tokens - 1)

    def _body(self, prompt_tokens: int, max_tokens: int) -> dict[str, Any]:
        prompt = self._rng.integers(_FIRST_TOKEN, _VOCAB_SIZE, prompt_tokens).tolist()
        return {"model": "tokasaurus-builtin", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Keep every slot busy with a Batch job. Raises ``RuntimeError`` if the job ends before the context."""
        config = self._config
        # Enough lines for the duration of the online requests, if a step takes a millisecond.
        rounds = config.requests * config.gap_ms * 4 / config.line_tokens + 20
        lines = [
            {"custom_id": str(number), "method": "POST", "url": "/v1/completions",
             "body": self._body(config.line_prompt_tokens, self._line_tokens())}
            for number in range(int(min(rounds * config.slots, 50_000)))
        ]  # fmt: skip
        content = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
        with OpenAI(base_url=f"{self._url}/v1", api_key="none", timeout=_TIMEOUT_S) as sdk:
            file = sdk.files.create(file=("in.jsonl", content), purpose="batch")
            batch = sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
            eventually(lambda: self._metric("toka_num_requests_running") >= config.slots)
            yield
            if not self._metric("toka_num_requests_waiting"):
                raise RuntimeError("the Batch job ended before the last online request: raise line_tokens")
            sdk.batches.cancel(batch.id)

    def _line_tokens(self) -> int:
        """Return the tokens of a line. They differ, so that lines do not end and begin in the same step."""
        return int(self._rng.integers(self._config.line_tokens // 2, self._config.line_tokens * 3 // 2 + 1))

    def yields(self) -> int:
        """Return the number of lines that were preempted."""
        return int(self._metric("toka_yields_total"))


@contextmanager
def server(config: BesideConfig) -> Iterator[Beside]:
    with tempfile.TemporaryDirectory() as directory:
        if config.worker == "real":
            flags = {"device": "cpu", "max_seqs_per_forward": config.slots, "store_dir": f"{directory}/store"}
            with serve(**flags) as running:
                yield Beside(config, running, running.base_url)
            return
        # Enough pages for every limit and tokens for every prompt, so that slots are the bottleneck.
        longest = max(config.prompt_tokens + config.output_tokens, config.line_prompt_tokens + 2 * config.line_tokens)
        shape = {
            "max_slots": config.slots,
            "page_count": config.slots * (longest // 16 + 2),
            "max_tokens_per_step": 2048,
            "step_ms": config.step_ms,
        }
        deployment = Deployment(Path(directory), worker=shape).wait_ready()
        try:
            yield Beside(config, deployment, deployment.url)
        finally:
            deployment.stop()


def measure(config: BesideConfig) -> dict[str, Any]:
    with server(config) as beside:
        beside.trickle()  # warm up
        alone = beside.trickle()
        with beside.batch():
            before = beside.yields()
            beside_batch = beside.trickle()
            yields = beside.yields() - before
    for times in (alone, beside_batch):
        times["first_token_steps"] = times["first_token_ms"] / times["per_token_ms"]
        times["first_token_p99_steps"] = times["first_token_p99_ms"] / times["per_token_ms"]
    ratio = {name: beside_batch[name] / alone[name] for name in alone}
    return {"worker": config.worker, "alone": alone, "beside_batch": beside_batch, "ratio": ratio, "yields": yields}


def main() -> None:
    config = from_command_line(BesideConfig)
    figures = measure(config)
    table = Table(title=f"{config.requests} requests, one every {config.gap_ms:g} ms; {config.slots} slots")
    for column in ("", "alone", "beside a batch", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name in figures["alone"]:
        table.add_row(name, *(f"{figures[part][name]:.2f}" for part in ("alone", "beside_batch", "ratio")))
    Console().print(table)
    report(figures)


if __name__ == "__main__":
    main()
