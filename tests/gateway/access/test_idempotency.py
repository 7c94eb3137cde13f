"""Requests that are sent again: what they made once they make no second time."""

import asyncio
import io
import json
import secrets

import httpx
import openai
import pytest
from openai.lib.streaming.responses import ResponseTextDeltaEvent

from services.common.errors import ReusedIdempotencyKey
from services.gateway.http.idempotency import seed_of_retries
from services.gateway.store import tries
from services.gateway.store.database import Store
from services.gateway.store.tries import Tries
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import PATIENCE_S, Deployment, eventually
from tests.gateway.test_agent_bodies import PATCH, SHELL, calling
from tests.gateway.test_responses import WEATHER, raw_events
from tests.gateway.test_tools import CALL, THOUGHT

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 2}}\n'


@pytest.fixture
def again() -> dict[str, str]:
    """The header of one request and its retries."""
    return {"Idempotency-Key": secrets.token_hex(16)}


def upload(sdk, headers, content: bytes = LINE):
    return sdk.files.create(file=("a.jsonl", io.BytesIO(content)), purpose="batch", extra_headers=headers)


def begin(sdk, file_id: str, headers, **more):
    settings = {"endpoint": "/v1/completions", "completion_window": "24h"} | more
    return sdk.batches.create(input_file_id=file_id, extra_headers=headers, **settings)


def test_a_file_that_is_sent_again_is_the_first_one(sdk, again):
    files = len(sdk.files.list().data)
    first = upload(sdk, again)
    assert upload(sdk, again) == first
    assert len(sdk.files.list().data) == files + 1
    assert sdk.files.content(first.id).read() == LINE
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        upload(sdk, again, LINE * 2)
    assert (caught.value.code, caught.value.param) == ("idempotency_key_reused", "Idempotency-Key")
    assert upload(sdk, {}).id != upload(sdk, {}).id


def test_a_batch_that_is_sent_again_is_the_first_one(sdk, again):
    file = upload(sdk, {})
    first = begin(sdk, file.id, again)
    eventually(lambda: sdk.batches.retrieve(first.id).status == "completed")
    assert begin(sdk, file.id, again).status == "completed"
    assert begin(sdk, file.id, again).id == first.id
    with pytest.raises(openai.UnprocessableEntityError):
        begin(sdk, file.id, again, metadata={"a": "b"})
    assert begin(sdk, file.id, {}).id != first.id


async def test_of_batches_at_the_same_time_there_is_one(deployment, sdk, again):
    file = upload(sdk, {})
    async with deployment.async_sdk() as client:
        made = await asyncio.gather(*(begin(client, file.id, again) for _ in range(8)))
    assert len({batch.id for batch in made}) == 1


def test_a_stored_response_is_told_again(sdk, model, again):
    ask = {"model": model, "input": "Hi", "max_output_tokens": 8}
    first = sdk.responses.create(**ask, extra_headers=again)
    second = sdk.responses.create(**ask, extra_headers=again)
    assert second == first
    with pytest.raises(openai.UnprocessableEntityError):
        sdk.responses.create(**ask | {"input": "Hello"}, extra_headers=again)
    assert sdk.responses.retrieve(first.id) == first


def test_a_response_that_is_streamed_again_has_the_same_id_and_text(sdk, model, again):
    ask = {"model": model, "input": "Hi", "max_output_tokens": 8, "temperature": 1.0, "stream": True}
    told = []
    for _ in range(2):
        *_, last = sdk.responses.create(**ask, extra_headers=again)
        told.append((last.response.id, last.response.output_text, last.response.store))
    assert told[0] == told[1]
    assert sdk.responses.retrieve(told[0][0]).output_text == told[0][1]


def without_deltas(events: list[dict]) -> list[dict]:
    return [event | {"sequence_number": 0} for event in events if not event["type"].endswith(".delta")]


def delta_texts(events: list[dict]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for event in events:
        if event["type"].endswith(".delta"):
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    return texts


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Yes, we can.", "top_logprobs": 2},
        {"input": "Yes, we can.", "max_output_tokens": 2},
        {"input": f"{THOUGHT}Let me see. {CALL}", "tools": [WEATHER], "include": ["reasoning.encrypted_content"]},
        {"input": calling("apply_patch", input="*** Begin Patch"), "tools": [PATCH]},
        {"input": calling("local_shell", command=["ls"]), "tools": [SHELL]},
    ],
    ids=["text", "incomplete", "reasoning and call", "custom call", "shell call"],
)
def test_a_stored_stream_is_sent_again_with_the_same_events(qwen, again, body):
    first, second = (raw_events(qwen, again, **body) for _ in range(2))
    assert without_deltas(second) == without_deltas(first)
    assert delta_texts(second) == delta_texts(first)


def test_a_stream_with_a_conversation_is_generated_once(qwen, again):
    with qwen.sdk() as sdk:
        conversation = sdk.conversations.create().id
        ask = {"model": sdk.models.list().data[0].id, "input": "One", "conversation": conversation}
        responses = []
        for _ in range(2):
            with sdk.responses.stream(**ask, extra_headers=again) as stream:
                deltas = [event.delta for event in stream if isinstance(event, ResponseTextDeltaEvent)]
                responses.append(stream.get_final_response().to_dict())
            assert "".join(deltas) == "One"
        assert responses[1] == responses[0]  # also the usage: the second prompt would contain the first turn
        assert len(sdk.conversations.items.list(conversation).data) == 2


async def test_a_stream_that_failed_is_generated_again_and_replaced(tmp_path):
    worker = FakeWorker(step_s=1.0)
    running = Deployment(tmp_path, worker_address=await worker.start())
    try:
        await asyncio.to_thread(running.wait_ready)
        async with running.async_sdk() as sdk:
            model, conversation = (await sdk.models.list()).data[0].id, (await sdk.conversations.create()).id

            async def last_response(conversation_id: str | None):
                again = {"Idempotency-Key": f"failed-{conversation_id}"}
                stream = await sdk.responses.create(
                    model=model, input="Hi", max_output_tokens=50, conversation=conversation_id, stream=True,
                    extra_headers=again, extra_body={"timeout": 5},
                )  # fmt: skip
                return [event async for event in stream][-1].response

            async def each_response() -> list:
                return await asyncio.gather(last_response(None), last_response(conversation))

            failed = await each_response()
            assert {(await sdk.responses.retrieve(response.id)).status for response in failed} == {"failed"}
            worker.step_s = 0.0
            repeated = await each_response()
            assert [(each.id, each.status) for each in repeated] == [(each.id, "incomplete") for each in failed]
            assert await each_response() == repeated
            assert [await sdk.responses.retrieve(response.id) for response in repeated] == repeated
            items = [item async for item in sdk.conversations.items.list(conversation, order="asc")]
            assert [item.content[0].text for item in items] == ["Hi", repeated[1].output_text]
    finally:
        running.stop()
        await worker.stop()


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_a_seed_is_drawn_again_as_it_was(deployment, model, again, stream):
    body = {"model": model, "prompt": "Hi", "max_tokens": 12, "temperature": 1.0, "n": 2, "stream": stream}

    def texts(headers) -> dict[int, str]:
        told = httpx.post(deployment.url + "/v1/completions", json=body, headers=headers, timeout=PATIENCE_S).text
        events = [line.removeprefix("data: ") for line in told.splitlines() if line and "[DONE]" not in line]
        found: dict[int, str] = {}
        for choice in (choice for event in events for choice in json.loads(event)["choices"]):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return found

    first = texts(again)
    assert texts(again) == first
    assert len(set(first.values())) == 2
    assert texts({"Idempotency-Key": "another"}) != first


def test_an_own_seed_counts_before_that_of_the_retries(sdk, model, again):
    ask = {"model": model, "prompt": "Hi", "max_tokens": 12, "temperature": 1.0, "seed": 7}
    assert (
        sdk.completions.create(**ask, extra_headers=again).choices[0].text
        == sdk.completions.create(**ask).choices[0].text
    )


def test_conversations_of_one_list_are_drawn_apart(deployment, again):
    one = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 1.0}

    def ask() -> list[str]:
        url = deployment.url + "/v1/chat/completions/batch"
        told = httpx.post(url, json=[one, one], headers=again, timeout=PATIENCE_S).json()
        return [answer["choices"][0]["message"]["content"] for answer in told]

    first = ask()
    assert first == ask()
    assert first[0] != first[1]


@pytest.mark.parametrize("wrong", ["x" * 256, "two words"])
def test_a_key_that_is_none_is_refused(deployment, wrong):
    url = deployment.url + "/v1/completions"
    answer = httpx.post(url, json={"prompt": "x"}, headers={"Idempotency-Key": wrong}, timeout=PATIENCE_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Idempotency-Key")


def test_seeds_tell_owners_keys_paths_and_bodies_apart():
    parts = ("a", "k", "/v1", b"body")
    others = (
        ("b", "k", "/v1", b"body"),
        ("a", "l", "/v1", b"body"),
        ("a", "k", "/v2", b"body"),
        ("ak", "", "/v1", b""),
    )
    assert len({seed_of_retries(*each) for each in (parts, *others)}) == 5
    assert 0 <= seed_of_retries(*parts) < 2**64


@pytest.fixture
async def records(tmp_path):
    store = await Store.open(f"sqlite+aiosqlite:///{tmp_path}/x.db")
    yield Tries(store)
    await store.close()


async def test_names_belong_to_an_owner_and_a_key(records):
    first = await records.name("a", "k", "f")
    assert await records.name("a", "k", "f") == first
    assert len({first, await records.name("b", "k", "f"), await records.name("a", "l", "f")}) == 3
    with pytest.raises(ReusedIdempotencyKey):
        await records.name("a", "k", "g")


async def test_all_who_come_at_once_get_one_name(records):
    assert len(set(await asyncio.gather(*(records.name("a", "k", "f") for _ in range(8))))) == 1


async def test_a_key_may_be_used_again_after_its_time(records, monkeypatch):
    first = await records.name("a", "k", "f")
    monkeypatch.setattr(tries, "TRIES_EXPIRE_S", 0)
    assert await records.name("a", "k", "g") != first
    await records.forget_expired()
    monkeypatch.undo()
    await records.name("a", "k", "h")
