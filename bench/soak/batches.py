"""Batch jobs, one after the other: upload a file, run its lines, read the answers, and delete all files."""

import asyncio
import io
import json
from collections.abc import Callable

from openai import AsyncOpenAI, OpenAIError

from bench.batch_kills import line

_POLL_S = 0.5
_TIMEOUT_S = 300.0
_ENDED = ("completed", "failed", "expired", "cancelled")


class Batches:
    """A client of Batch jobs, on the program's event loop. ``failures`` has a message for each failure."""

    def __init__(self, url: str, lines: int, pause_s: float) -> None:
        self.done = 0
        self.lines_done = 0
        self.failures: list[str] = []
        self._url, self._lines, self._pause_s = url, lines, pause_s

    async def run(self, over: Callable[[], bool]) -> None:
        async with AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as sdk:
            while self._lines and not over():
                try:
                    async with asyncio.timeout(_TIMEOUT_S):
                        await self._one(sdk)
                except (OpenAIError, TimeoutError, ValueError) as error:
                    self.failures.append(f"batch {self.done}: {error!r}")
                self.done += 1
                await asyncio.sleep(self._pause_s)

    async def _one(self, sdk: AsyncOpenAI) -> None:
        first = self.done * self._lines
        content = "\n".join(line(first + number, 9, 0) for number in range(self._lines)).encode()
        file = await sdk.files.create(file=("in.jsonl", io.BytesIO(content)), purpose="batch")
        batch = await sdk.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        while batch.status not in _ENDED:
            await asyncio.sleep(_POLL_S)
            batch = await sdk.batches.retrieve(batch.id)
        if batch.status != "completed" or batch.output_file_id is None:
            raise ValueError(f"status {batch.status}: {batch.errors}")
        answers = [json.loads(text) for text in (await sdk.files.content(batch.output_file_id)).content.splitlines()]
        returned = [answer["custom_id"] for answer in answers]
        if returned != [f"r{first + number}" for number in range(self._lines)]:
            raise ValueError(f"{len(returned)} lines of {self._lines} have answers, or the order differs")
        for name in (file.id, batch.output_file_id):
            await sdk.files.delete(name)
        self.lines_done += len(returned)
