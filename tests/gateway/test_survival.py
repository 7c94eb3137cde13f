"""A scheduler is killed, and every endpoint answers what it would have answered."""

import asyncio
import json
import signal
from collections.abc import Awaitable
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.gateway.batch.requests import ENDED, line
from tests.gateway.deployment import eventually_async
from tests.gateway.replicas import Replicas

pytestmark = pytest.mark.slow

MODEL = "tokasaurus-builtin"
PROMPT = list(range(50, 90))
LETTERS = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab", "cd"]}}}
CHAT = [{"role": "user", "content": "What is the weather in Paris?"}]
# What is different each time, or in which scheduler answers.
_OWN = {
    "id",
    "created",
    "created_at",
    "completed_at",
    "cached_tokens",
    "item_id",
    "obfuscation",
    "request_id",
    "timing",
}
_SIZE: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "seed": 3, "temperature": 0.8}
_LINES = 12


def plain(told: Any) -> Any:
    """Without what is different each time."""
    if isinstance(told, dict):
        return {key: plain(value) for key, value in told.items() if key not in _OWN}
    return [plain(each) for each in told] if isinstance(told, list) else told


async def streamed(call: Awaitable) -> list:
    """The text, the log-probabilities and all else that came, in pieces that do not depend on when it came."""
    text, logprobs, rest = "", [], []
    async for chunk in await call:
        for choice in chunk.choices:
            delta = getattr(choice, "delta", None)
            text += (choice.text if delta is None else delta.content) or ""
            if choice.logprobs is not None:
                told = choice.logprobs.to_dict()
                logprobs += told["content"] if "content" in told else told["token_logprobs"]
            if choice.finish_reason:
                rest.append(choice.finish_reason)
        if chunk.usage:
            rest.append(plain(chunk.usage.to_dict()))
    return [text, logprobs, rest]


async def whole(call: Awaitable) -> Any:
    return plain((await call).to_dict())


async def response_events(sdk: AsyncOpenAI, **body: Any) -> Any:
    """The last event's response, and the same as it was kept."""
    async for event in await sdk.responses.create(stream=True, **body):
        last = event
    kept = await sdk.responses.retrieve(last.response.id)
    assert plain(kept.to_dict()) == plain(last.response.to_dict())
    return plain(kept.to_dict())


async def batch(sdk: AsyncOpenAI) -> list:
    """The lines of a batch's output."""
    lines = [line(f"r{n}", prompt=[30 + n, *PROMPT], **_SIZE) for n in range(_LINES)]
    made = await sdk.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    begun = await sdk.batches.create(input_file_id=made.id, endpoint="/v1/completions", completion_window="24h")
    async with asyncio.timeout(60):
        while (now := await sdk.batches.retrieve(begun.id)).status not in ENDED:
            pass
    assert now.request_counts.completed == _LINES
    told = await sdk.files.content(now.output_file_id)
    return [plain(each) for each in map(json.loads, told.text.splitlines())]


def everything(sdk: AsyncOpenAI) -> list[Awaitable]:
    complete, chat = sdk.completions.create, sdk.chat.completions.create
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    answer = {"model": MODEL, "input": "Hi", "max_output_tokens": 60, "temperature": 0}
    penalties = {"frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"70": 2.5}}
    return [
        streamed(complete(prompt=PROMPT, echo=True, logprobs=2, **_SIZE, **stream)),
        whole(complete(prompt=[PROMPT, PROMPT[::-1]], n=2, extra_body={"prompt_logprobs": 2}, **_SIZE)),
        whole(complete(prompt=PROMPT, n=2, best_of=4, **penalties, **_SIZE)),
        streamed(chat(messages=CHAT, logprobs=True, top_logprobs=2, **_SIZE, **stream)),
        whole(chat(messages=CHAT, response_format=LETTERS, **penalties, **_SIZE)),
        whole(chat(messages=CHAT, extra_body={"return_token_ids": True, "min_tokens": 50}, **_SIZE)),
        whole(sdk.responses.create(**answer)),
        response_events(sdk, **answer),
        batch(sdk),
    ]


@pytest.mark.timeout(300)
async def test_every_endpoint_answers_what_it_would_have_answered(tmp_path):
    async with (
        Replicas.running(tmp_path, 2, worker={"step_ms": 30}) as pair,
        pair.deployment.async_sdk() as sdk,
    ):
        metric = pair.deployment.metric
        for worker in pair.workers:  # none is at its end when the last one comes
            worker.signal(signal.SIGSTOP)
        asked = [asyncio.create_task(each) for _ in range(3) for each in everything(sdk)]
        await eventually_async(lambda: metric("toka_num_requests_running") + metric("toka_num_requests_waiting") > 60)
        for worker in pair.workers:
            worker.signal(signal.SIGCONT)
        await eventually_async(lambda: metric("toka_generation_tokens_total") > 300)
        pair.schedulers[0].kill()
        answers = await asyncio.gather(*asked)
        assert await asyncio.to_thread(metric, "toka_failovers_total") > 10
        undisturbed = await asyncio.gather(*everything(sdk))
        for number, answer in enumerate(answers):
            assert answer == undisturbed[number % len(undisturbed)]
