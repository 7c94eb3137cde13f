"""Requests of every kind, at a constant rate."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from bench.chaos.answer import Defect, Stream, check
from bench.chaos.exchange import ask_stream, ask_whole, http_client
from bench.chaos.questions import MODEL, Question

_TIMEOUT_S = 120.0
_PATHS = ("/v1/models", "/ready", "/health", "/metrics")
_SENTENCE = "Over one more hill they went, and past one more river. "


class Load:
    """The clients, on the program's event loop. ``failures`` has a message for each failure."""

    def __init__(self, urls: Sequence[str], questions: Sequence[Question], rate: float, seed: int) -> None:
        self.done: Counter[str] = Counter()  # by kind
        self.failures: list[str] = []
        self._urls, self._questions = list(urls), questions
        self._gap_s = 1 / rate
        self._began = self._next_at = time.monotonic()
        self._chance = random.Random(seed)
        self._count = 0
        kinds = {self._known: 35, self._fresh: 35, self._typed: 5, self._gone: 10, self._refused: 10, self._look: 5}
        self._kinds, self._weights = list(kinds), list(kinds.values())

    async def run(self, concurrency: int, over: Callable[[], bool]) -> None:
        async with http_client(2 * concurrency) as http:
            await asyncio.gather(*(self._client(http, over) for _ in range(concurrency)))

    async def _client(self, http: httpx.AsyncClient, over: Callable[[], bool]) -> None:
        while not over():
            now = time.monotonic()
            self._next_at = max(self._next_at, now - 1) + self._gap_s
            await asyncio.sleep(self._next_at - now)
            kind = self._chance.choices(self._kinds, self._weights)[0]
            name = kind.__name__.removeprefix("_")
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await kind(http, self._chance.choice(self._urls))
                self.done[name] += 1
            except (Defect, httpx.HTTPError, TimeoutError) as error:
                failure = f"{name} at {time.monotonic() - self._began:.0f} s: {error!r}"
                self.failures.append(f"{failure}, for {error.__cause__!r}" if error.__cause__ is not None else failure)

    async def _known(self, http: httpx.AsyncClient, url: str) -> None:
        """Send a request with a known answer, streamed or not."""
        question = self._chance.choice(self._questions)
        if self._chance.random() < 0.5:
            answer = await ask_stream(http, url, question, Stream(), lambda: None)
        else:
            answer = await ask_whole(http, url, question)
        check(question.right, answer)

    async def _fresh(self, http: httpx.AsyncClient, url: str) -> None:
        """Send a new prompt. Some are long."""
        await ask_whole(http, url, Question(0, "/v1/completions", self._body() | {"max_tokens": 8}))

    async def _typed(self, http: httpx.AsyncClient, url: str) -> None:
        """Send a request with a new schema."""
        schema = {"type": "object", "properties": {f"n{self._count}": {"type": "integer", "maximum": 9}}}
        told = {"type": "json_schema", "json_schema": {"name": "fresh", "schema": schema}}
        body = self._body() | {"max_tokens": 8, "response_format": told}
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        await ask_whole(http, url, Question(0, "/v1/chat/completions", body))

    async def _gone(self, http: httpx.AsyncClient, url: str) -> None:
        """Disconnect during a stream."""
        body = self._body() | {"max_tokens": 500, "stream": True, "n": 2, "ignore_eos": True}
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            async for _ in response.aiter_bytes():
                break

    async def _refused(self, http: httpx.AsyncClient, url: str) -> None:
        """Send a request that must be refused."""
        response = await http.post(f"{url}/v1/completions", json=self._body() | {"max_tokens": -1})
        if response.status_code != httpx.codes.BAD_REQUEST:
            raise Defect("wrong", f"status {response.status_code} for max_tokens=-1: {response.text[:200]}")

    async def _look(self, http: httpx.AsyncClient, url: str) -> None:
        response = await http.get(url + self._chance.choice(_PATHS))
        if response.status_code != httpx.codes.OK:
            raise Defect("wrong", f"status {response.status_code} for {response.url}")

    def _body(self) -> dict[str, Any]:
        self._count += 1
        story = _SENTENCE * self._chance.choice((0, 1, 2, 40))
        return {"model": MODEL, "prompt": f"{self._count} sheep. {story}", "temperature": 0.7, "seed": self._count}
