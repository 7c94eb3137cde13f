"""Many different requests at once, each answered as if it were alone."""

import asyncio

import openai
import pytest

REQUESTS = 200


def completion_body(number: int) -> dict:
    body = {"prompt": [20 + number, 21, 22], "seed": number, "max_tokens": 5 + number % 20, "n": 1 + number % 3}
    if number % 4 == 1:
        body["logprobs"] = number % 5
    if number % 5 == 2:
        body["temperature"] = 0
        body["n"] = 1
    return body


async def ask(client, model, number: int):
    """The texts of request ``number``, or the error it must get."""
    kind = number % 4
    if kind == 3 and number % 8 == 3:
        try:
            await client.completions.create(model=model, prompt="x", temperature=-1)
        except openai.BadRequestError:
            return "refused"
    if kind == 2:
        messages = [{"role": "user", "content": f"question {number}"}]
        chat = await client.chat.completions.create(model=model, messages=messages, seed=number, max_tokens=10)
        return [choice.message.content for choice in chat.choices]
    if kind == 1:
        return [c.text for c in (await client.completions.create(model=model, **completion_body(number))).choices]
    body = completion_body(number)
    texts = [""] * body["n"]
    async for chunk in await client.completions.create(model=model, stream=True, **body):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    return texts


@pytest.mark.slow
async def test_two_hundred_mixed_requests_at_once_are_answered_as_alone(deployment, model):
    async with deployment.async_sdk() as client:
        together = await asyncio.gather(*(ask(client, model, number) for number in range(REQUESTS)))
        alone = [await ask(client, model, number) for number in range(REQUESTS)]
    assert together == alone


async def test_nothing_is_left_behind(deployment, model):
    async with deployment.async_sdk() as client:
        await asyncio.gather(*(ask(client, model, number) for number in range(50)))
        for _ in range(600):
            if await asyncio.to_thread(deployment.metric, "toka_kv_pages_in_use") == 0:
                break
            await asyncio.sleep(0.05)
    assert deployment.metric("toka_kv_pages_in_use") == 0
