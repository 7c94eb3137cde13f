"""Responses that are kept, told again, gone on with and deleted, through the official SDK. The model says what the user
said."""

import asyncio
import json
import sqlite3

import httpx
import openai
import pytest

from services.gateway.engine.text import INLINE_BYTES, TextEngine
from services.gateway.openai.messages import MAX_MESSAGES
from services.gateway.openai.responses.keeping import MAX_EARLIER_BYTES
from services.gateway.store.tables import StoredResponse
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import PATIENCE_S, Deployment, Process, eventually, free_port
from tests.gateway.test_responses import WEATHER, raw_events
from tests.gateway.test_responses import client as client
from tests.gateway.test_responses import name as name
from tests.gateway.test_tools import CALL, THOUGHT


def test_a_response_is_told_again_until_it_is_deleted(client, name):
    made = client.responses.create(model=name, input="Yes, we can.", metadata={"a": "b"})
    assert made.store is True
    assert client.responses.retrieve(made.id).to_dict() == made.to_dict()
    assert client.responses.delete(made.id) is None
    for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            ask(made.id)


def test_a_streamed_response_is_kept_before_its_end_is_told(qwen, client):
    last = raw_events(qwen, input="Yes.")[-1]["response"]
    kept = client.responses.retrieve(last["id"])
    assert (kept.output_text, kept.status, kept.store) == ("Yes.", "completed", True)
    assert kept.to_dict() == last
    cut = raw_events(qwen, input="Yes, we can do this.", max_output_tokens=1)[-1]["response"]
    assert client.responses.retrieve(cut["id"]).incomplete_details.reason == "max_output_tokens"


def test_what_is_not_to_be_stored_is_not(client, name):
    response = client.responses.create(model=name, input="Hi", store=False)
    assert response.store is False
    with pytest.raises(openai.NotFoundError, match="was not stored"):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=name, input="Hi", previous_response_id=response.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_conversation_goes_on(client, name, qwen):
    first = client.responses.create(model=name, instructions="Be brief.", input=THOUGHT + "One")
    second = client.responses.create(model=name, input="Two", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    client.responses.delete(first.id)  # the second has what it needs
    third = client.responses.create(model=name, input="Three", previous_response_id=second.id, store=False)
    messages = [
        {"role": "user", "content": THOUGHT + "One"},
        {"role": "assistant", "content": "One", "reasoning_content": "Is it cold?"},
        {"role": "user", "content": "Two"},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    assert third.usage.input_tokens == qwen.post("/tokenize", {"messages": messages}).json()["count"]
    assert third.output_text == "Three"


def test_the_result_of_a_call_needs_no_more_than_itself(client, name):
    first = client.responses.create(model=name, input=CALL, tools=[WEATHER])
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "9 degrees"}
    with client.responses.stream(model=name, input=[result], tools=[WEATHER], previous_response_id=first.id) as stream:
        for _ in stream:
            pass
        second = stream.get_final_response()
    assert second.output_text == "9 degrees"
    told = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in told] == ["message", "function_call", "function_call_output"]
    assert told[1].id == first.output[0].id


def test_input_items_are_listed_page_by_page(client, name):
    items = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "One"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"role": "assistant", "content": "Two"},
        {"role": "user", "content": "Three"},
    ]
    response = client.responses.create(model=name, input=items)
    told = list(client.responses.input_items.list(response.id, order="asc"))
    kinds = ["system", "user", None, "assistant", "user"]
    assert [getattr(item, "role", None) for item in told] == kinds
    assert told[2].id == "rs_1"
    assert [told[place].content[0].text for place in (0, 1, 3, 4)] == ["Be brief.", "One", "Two", "Three"]
    assert (told[3].content[0].type, told[4].content[0].type) == ("output_text", "input_text")
    page = client.responses.input_items.list(response.id, limit=2)
    assert [item.id for item in page.data] == [told[4].id, told[3].id]
    assert page.has_more
    rest = client.responses.input_items.list(response.id, after=page.data[-1].id)
    assert [item.id for item in rest.data] == [item.id for item in told[2::-1]]
    assert not rest.has_more
    with pytest.raises(openai.BadRequestError, match="there is no such item"):
        client.responses.input_items.list(response.id, after="msg_x")


@pytest.mark.parametrize(
    ("query", "param"),
    [({"stream": "true"}, "stream"), ({"include": "file_search_call.results"}, "include"), ({"stream": "false"}, None)],
)
def test_a_response_is_told_whole(qwen, client, name, query, param):
    made = client.responses.create(model=name, input="Hi")
    answer = httpx.get(f"{qwen.url}/v1/responses/{made.id}", params=query, timeout=PATIENCE_S)
    assert answer.status_code == (200 if param is None else 400)
    assert param is None or answer.json()["error"]["param"] == param


def test_without_a_store_responses_say_that_they_are_not_kept(bare):
    with bare.sdk() as client:
        name = client.models.list().data[0].id
        assert client.responses.create(model=name, input="Hi", max_output_tokens=2).store is False
        for body in ({"store": True}, {"previous_response_id": "resp_1"}):
            with pytest.raises(openai.BadRequestError, match="store_url=none") as caught:
                client.responses.create(model=name, input="Hi", **body)
            assert caught.value.param == next(iter(body))
        with pytest.raises(openai.NotFoundError, match="store_url=none"):
            client.responses.retrieve("resp_1")


@pytest.mark.slow
def test_a_store_that_breaks_fails_no_answer(tmp_path):
    running = Deployment(tmp_path).wait_ready()
    try:
        with running.sdk() as client:
            name = client.models.list().data[0].id
            assert client.responses.create(model=name, input="Hi", max_output_tokens=2).store is True
            with sqlite3.connect(tmp_path / "store" / "batches.db") as database:
                database.execute(f"DROP TABLE {StoredResponse.__tablename__}")
            database.close()
            response = client.responses.create(model=name, input="Hi", max_output_tokens=2)
            assert response.store is False
            assert response.usage.output_tokens == 2
            last = raw_events(running, max_output_tokens=2)[-1]
            assert (last["type"], last["response"]["store"]) == ("response.incomplete", False)
            with pytest.raises(openai.InternalServerError, match="the store does not answer"):
                client.responses.retrieve(response.id)
    finally:
        running.stop()


@pytest.mark.slow
def test_a_store_that_refuses_fails_no_answer(tmp_path):
    running = Deployment(tmp_path).wait_ready()
    try:
        assert running.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2}).json()["store"] is True
        with sqlite3.connect(tmp_path / "store" / "batches.db") as database:
            refuse = "BEGIN SELECT RAISE(ABORT, 'not today'); END"
            database.execute(f"CREATE TRIGGER no BEFORE INSERT ON {StoredResponse.__tablename__} {refuse}")
        database.close()
        answer = running.post("/v1/responses", {"input": "Hi", "max_output_tokens": 2})
        assert (answer.status_code, answer.json()["store"]) == (200, False)
        last = raw_events(running, max_output_tokens=2)[-1]
        assert (last["type"], last["response"]["store"]) == ("response.incomplete", False)
        eventually(lambda: "not today" in running.logs())
    finally:
        running.stop()


def thoughts(count: int, text: str = "") -> list[dict]:
    """Items that no prompt has, and a last one that it has."""
    parts = [{"type": "summary_text", "text": text}] if text else []
    return [
        *({"type": "reasoning", "id": str(number), "summary": parts} for number in range(count)),
        {"role": "user", "content": "Hi"},
    ]


@pytest.mark.parametrize(
    ("items", "turns", "words"),
    [
        (thoughts(MAX_MESSAGES // 4), 4, f"at most {MAX_MESSAGES}"),  # a body has no room for all of them
        (thoughts(1, "x" * MAX_EARLIER_BYTES), 1, "bytes"),
    ],
    ids=["items", "bytes"],
)
def test_a_conversation_goes_on_within_bounds(qwen, items, turns, words):
    previous = None
    for _ in range(turns - 1 if turns > 1 else 1):
        answer = qwen.post("/v1/responses", {"input": items, "previous_response_id": previous})
        assert (answer.status_code, answer.json().get("store")) == (200, True), answer.text[:300]
        previous = answer.json()["id"]
    more = items if turns > 1 else "Hi"
    refused = qwen.post("/v1/responses", {"input": more, "previous_response_id": previous})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "previous_response_id")
    assert words in error["message"]


def test_a_long_conversation_is_put_together_and_listed(client, name, qwen):
    items = [*thoughts(1, "x" * INLINE_BYTES)[:1], *thoughts(1)]  # what was thought last is all that a prompt has
    first = client.responses.create(model=name, input=items)
    second = client.responses.create(model=name, input="Two", previous_response_id=first.id)
    assert second.output_text == "Two"
    told = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in told] == ["reasoning", "reasoning", "message", "message", "message"]
    assert told[0].summary[0].text == "x" * INLINE_BYTES


@pytest.mark.parametrize("size", [INLINE_BYTES, INLINE_BYTES + 1])
async def test_what_is_large_is_worked_on_in_a_thread(size, tokenizer, monkeypatch):
    text, threads = TextEngine(tokenizer), []

    async def in_thread(work, *arguments):
        threads.append(work)
        return work(*arguments)

    monkeypatch.setattr(text, "in_thread", in_thread)
    assert await text.worked(size, len, "abc") == 3
    assert threads == [len] * (size > INLINE_BYTES)


def test_logprobs_stay_with_their_response(client, name):
    first = client.responses.create(model=name, input="Yes.", top_logprobs=2)
    assert first.output[0].content[0].logprobs
    second = client.responses.create(model=name, input="No.", previous_response_id=first.id)
    told = list(client.responses.input_items.list(second.id, order="asc"))
    assert (told[1].id, told[1].content[0].logprobs) == (first.output[0].id, [])


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_items_with_one_id_are_listed_once_each(client, name, order):
    items = [{"type": "message", "id": "msg_1", "role": "user", "content": str(number)} for number in range(4)]
    first = client.responses.create(model=name, input=items)
    second = client.responses.create(model=name, input=items, previous_response_id=first.id)
    told = []
    for item in client.responses.input_items.list(second.id, order=order, limit=2):
        told.append(item)
        assert len(told) <= 9, "there is no end to it"
    assert len({item.id for item in told}) == len(told) == 9
    first_of_all = told[0] if order == "asc" else told[-1]
    assert (first_of_all.id, first_of_all.content[0].text) == ("msg_1", "0")


def test_lines_of_a_batch_are_kept_by_the_batch(qwen, client, name, tmp_path):
    path = tmp_path / "in.jsonl"
    bodies = ({"input": "Hi"}, {"input": "Hi", "store": True}, {"input": "Hi", "store": None})
    given = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}
        for number, body in enumerate(bodies)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in given))
    with path.open("rb") as lines:
        file = client.files.create(file=lines, purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    eventually(lambda: client.batches.retrieve(batch.id).status == "completed")
    output = client.files.content(client.batches.retrieve(batch.id).output_file_id)
    told = [json.loads(line)["response"]["body"] for line in output.text.splitlines()]
    assert [response["store"] for response in told] == [False] * 3
    assert qwen.status(f"/v1/responses/{told[1]['id']}") == 404


@pytest.mark.slow
def test_gateways_with_one_store_know_each_others_responses(qwen, client, name, tmp_path):
    port = free_port()
    other = Process(
        tmp_path / "other.log", "services.gateway", port=port, scheduler_addresses=qwen.scheduler_address,
        model=qwen.directory / "parrot", store_dir=qwen.directory / "store",
    )  # fmt: skip
    try:
        first = client.responses.create(model=name, input="One")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=9) as neighbour:
            assert neighbour.responses.retrieve(first.id).output_text == "One"
            second = neighbour.responses.create(model=name, input="Two", previous_response_id=first.id)
        assert client.responses.retrieve(second.id).output_text == "Two"
        assert len(client.responses.input_items.list(second.id).data) == 3
    finally:
        other.stop()


@pytest.mark.slow
async def test_a_stream_that_breaks_ends_with_a_failed_response(tmp_path):
    worker = FakeWorker(step_s=0.005)
    running = Deployment(tmp_path, worker_address=await worker.start(), gateway={"failover_seconds": 0})
    try:
        await asyncio.to_thread(running.wait_ready)
        async with running.async_sdk() as sdk:
            name = (await sdk.models.list()).data[0].id
            stream = await sdk.responses.create(model=name, input="x", max_output_tokens=1900, stream=True)
            events = []
            async for event in stream:
                events.append(event)
                if event.type == "response.output_text.delta" and running.scheduler.running:
                    running.scheduler.kill()
            failed = events[-1]
            assert failed.type == "response.failed"
            assert (failed.response.status, failed.response.error.code) == ("failed", "server_error")
            assert "scheduler was lost" in failed.response.error.message
            said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            assert failed.response.output[0].content[0].text == said
            assert failed.response.output[0].status == "incomplete"
            kept = await sdk.responses.retrieve(failed.response.id)
            assert kept.to_dict() == failed.response.to_dict()
    finally:
        running.stop()
        await worker.stop()


# -- log-probabilities


def tokens_of(part) -> list[str]:
    return [token.token for token in part.logprobs]


def test_words_come_with_their_logprobs(qwen, client, name):
    body = {"model": name, "input": "Yes, we can.", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    [part] = client.responses.create(**body).output[0].content
    assert "".join(tokens_of(part)) == "Yes, we can."
    assert all(len(token.top_logprobs) == 2 and token.logprob < 0 for token in part.logprobs)
    with client.responses.stream(**body) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [(token.token, token.logprob) for event in deltas for token in event.logprobs]
    assert streamed == [(token.token, token.logprob) for token in part.logprobs]
    done = next(event for event in events if event.type == "response.output_text.done")
    assert [token.token for token in done.logprobs] == tokens_of(part)
    assert tokens_of(events[-1].response.output[0].content[0]) == tokens_of(part)
    chat = qwen.chat(messages=[{"role": "user", "content": "Yes, we can."}], logprobs=True, top_logprobs=2).json()
    content = chat["choices"][0]["logprobs"]["content"]
    assert [token["logprob"] for token in content] == [token.logprob for token in part.logprobs]


def test_logprobs_alone_have_no_others(client, name):
    response = client.responses.create(model=name, input="Yes.", include=["message.output_text.logprobs"])
    assert all(token.top_logprobs == [] for token in response.output[0].content[0].logprobs)
    assert client.responses.retrieve(response.id).output[0].content[0].logprobs
    response = client.responses.create(model=name, input="Yes.", top_logprobs=1)
    assert all(len(token.top_logprobs) == 1 for token in response.output[0].content[0].logprobs)


@pytest.mark.parametrize(
    "text",
    ["Let me see.", THOUGHT + "Let me see.", f"Let me see. {CALL}", f"{THOUGHT}Let me see. {CALL}{CALL}", "I < you <t"],
)
def test_only_words_for_the_user_have_logprobs(qwen, client, name, text):
    body = {"input": text, "tools": [WEATHER], "top_logprobs": 1}
    response = client.responses.create(model=name, **body)
    [message] = [item for item in response.output if item.type == "message"]
    told = "".join(tokens_of(message.content[0]))
    assert told.strip() == message.content[0].text.strip()
    last = raw_events(qwen, **body)[-1]["response"]
    [streamed] = [item for item in last["output"] if item["type"] == "message"]
    assert [token["token"] for token in streamed["content"][0]["logprobs"]] == tokens_of(message.content[0])
