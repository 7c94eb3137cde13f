"""Conversations in the store, and responses that belong to them, through the official SDK. The model says what the user
said."""

import openai
import pytest

from services.gateway.store import conversations as records
from services.gateway.store.conversations import Addition, Conversations
from services.gateway.store.database import Store
from tests.gateway.batch.conftest import store_url as store_url
from tests.gateway.deployment import eventually
from tests.gateway.test_errors import error_of
from tests.gateway.test_responses import WEATHER, raw_events, respond
from tests.gateway.test_responses import client as client
from tests.gateway.test_responses import name as name
from tests.gateway.test_tools import CALL


def user(text: str, **more) -> dict:
    return {"type": "message", "role": "user", "content": text} | more


def texts(client, conversation_id: str) -> list[str]:
    return [item.content[0].text for item in client.conversations.items.list(conversation_id, order="asc")]


def test_a_conversation_is_created_read_changed_and_deleted(client):
    made = client.conversations.create(metadata={"topic": "a"}, items=[user("One")])
    assert (made.object, made.metadata) == ("conversation", {"topic": "a"})
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"topic": "b"}).metadata == {"topic": "b"}
    assert client.conversations.update(made.id, metadata=None).metadata == {}
    assert texts(client, made.id) == ["One"]
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    for ask in (
        client.conversations.retrieve,
        client.conversations.delete,
        client.conversations.items.list,
        lambda each: client.conversations.update(each, metadata={}),
        lambda each: client.conversations.items.create(each, items=[user("x")]),
        lambda each: client.conversations.items.retrieve("msg_1", conversation_id=each),
        lambda each: client.conversations.items.delete("msg_1", conversation_id=each),
    ):
        with pytest.raises(openai.NotFoundError, match="there is no conversation") as caught:
            ask(made.id)
        assert caught.value.code == "conversation_not_found"


def test_items_are_added_listed_and_deleted(client):
    conversation = client.conversations.create()
    added = client.conversations.items.create(
        conversation.id,
        items=[
            user("One", id="msg_mine"),
            user("Two", id="msg_mine"),
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            user("Three", id="x" * 65),
        ],
    )
    assert [item.type for item in added.data] == ["message", "message", "function_call", "message"]
    ids = [item.id for item in added.data]
    assert (ids[0], len({*ids})) == ("msg_mine", 4)
    page = client.conversations.items.list(conversation.id, limit=3)
    assert [item.id for item in page.data] == ids[:0:-1]
    assert page.has_more
    assert [item.id for item in client.conversations.items.list(conversation.id, limit=1, order="asc")] == ids
    one = client.conversations.items.retrieve(ids[1], conversation_id=conversation.id)
    assert (one.type, one.content[0].text, one.status) == ("message", "Two", "completed")
    assert client.conversations.items.delete(ids[1], conversation_id=conversation.id).id == conversation.id
    with pytest.raises(openai.NotFoundError, match="there is no item"):
        client.conversations.items.retrieve(ids[1], conversation_id=conversation.id)
    assert len(client.conversations.items.list(conversation.id).data) == 3
    with pytest.raises(openai.BadRequestError, match="there is no such item"):
        client.conversations.items.list(conversation.id, after=ids[1])


@pytest.mark.parametrize("stored", [True, False])
def test_a_response_goes_on_with_its_conversation_and_adds_to_it(client, name, qwen, stored):
    conversation = client.conversations.create(items=[{"role": "system", "content": "Be brief."}])
    going_on = {"model": name, "conversation": conversation.id, "store": stored}
    first = client.responses.create(input="One", **going_on)
    assert first.conversation.id == conversation.id
    second = client.responses.create(
        input=[user("Two", id="msg_two")], **going_on | {"conversation": {"id": conversation.id}}
    )
    assert texts(client, conversation.id) == ["Be brief.", "One", "One", "Two", "Two"]
    roles = ["system", "user", "assistant", "user"]
    messages = [
        {"role": role, "content": text} for role, text in zip(roles, texts(client, conversation.id), strict=False)
    ]
    assert second.usage.input_tokens == qwen.post("/tokenize", {"messages": messages}).json()["count"]
    counted = client.responses.input_tokens.count(model=name, conversation=conversation.id)
    assert counted.input_tokens > second.usage.input_tokens
    ids = [item.id for item in client.conversations.items.list(conversation.id, order="asc")]
    assert (ids[3], ids[4]) == ("msg_two", second.output[0].id)
    if stored:
        told = list(client.responses.input_items.list(second.id, order="asc"))
        assert [item.id for item in told] == ids[:4]
        client.conversations.delete(conversation.id)
        assert client.responses.retrieve(second.id).conversation.id == conversation.id


def test_a_stream_and_a_background_response_add_to_their_conversation(client, name, qwen):
    conversation = client.conversations.create()
    raw_events(qwen, input="One", conversation=conversation.id)
    made = client.responses.create(model=name, input="Two", conversation=conversation.id, background=True)
    eventually(lambda: client.responses.retrieve(made.id).status == "completed")
    assert texts(client, conversation.id) == ["One", "One", "Two", "Two"]


def test_a_call_and_its_result_are_of_one_conversation(client, name):
    conversation = client.conversations.create()
    first = client.responses.create(model=name, input=CALL, tools=[WEATHER], conversation=conversation.id)
    result = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "9 degrees"}
    second = client.responses.create(model=name, input=[result], tools=[WEATHER], conversation=conversation.id)
    assert second.output_text == "9 degrees"
    kinds = ["message", "function_call", "function_call_output", "message"]
    assert [item.type for item in client.conversations.items.list(conversation.id, order="asc")] == kinds
    reference = {"type": "item_reference", "id": first.output[0].id}
    third = client.responses.create(
        model=name, input=[reference, result], tools=[WEATHER], conversation=conversation.id
    )
    assert third.output_text == "9 degrees"


def test_a_request_that_is_sent_again_adds_once(client, name):
    conversation = client.conversations.create()
    ask = {
        "model": name,
        "input": "One",
        "conversation": conversation.id,
        "extra_headers": {"Idempotency-Key": "conv-1"},
    }
    first = client.responses.create(**ask)
    assert client.responses.create(**ask).id == first.id
    events = list(client.responses.create(stream=True, **ask | {"extra_headers": {"Idempotency-Key": "conv-2"}}))
    list(client.responses.create(stream=True, **ask | {"extra_headers": {"Idempotency-Key": "conv-2"}}))
    assert events[-1].type == "response.completed"
    assert texts(client, conversation.id) == ["One"] * 4


def test_what_fails_adds_nothing(client, name, qwen):
    conversation = client.conversations.create()
    body = {"input": "word " * 4000, "conversation": conversation.id}
    error_of(respond(qwen, **body), 400)
    assert texts(client, conversation.id) == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/conversations", {"items": [user("x")] * 21}, "items"),
        ("/v1/conversations", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0]"),
        ("/v1/conversations", {"items": [{"type": "teleport"}]}, "items[0]"),
        ("/v1/conversations", {"metadata": {"a": 1}}, "metadata.a"),
        ("/v1/responses", {"input": "x", "conversation": "conv_1"}, "conversation"),
        ("/v1/responses", {"input": "x", "conversation": 5}, "conversation"),
        ("/v1/responses/input_tokens", {"conversation": "conv_1"}, "conversation"),
    ],
)
def test_what_cannot_be_is_named(qwen, path, body, param):
    assert error_of(qwen.post(path, body), 400)["param"] == param


async def test_a_conversation_has_bounds_and_an_end(store_url, monkeypatch):
    store = await Store.open(store_url)
    try:
        conversations = Conversations(store)
        made = await conversations.create({"a": "b"}, [{"id": "msg_1", "text": "x"}], "team")
        monkeypatch.setattr(records, "MAX_ITEMS", 2)
        await conversations.add(made.id, [{"id": "msg_2"}], "team")
        with pytest.raises(Exception, match="at most 2 items"):
            await conversations.add(made.id, [{"id": "msg_3"}], "team")
        assert len(await conversations.items(made.id, "team")) == 2
        await conversations.append(Addition(made.id, [{"id": "msg_3"}]), "team")  # it was within them when it began
        assert len(await conversations.items(made.id, "team")) == 3
        with pytest.raises(Exception, match="there is no conversation"):
            await conversations.get(made.id, "other")
        monkeypatch.setattr(records, "CONVERSATIONS_EXPIRE_S", -1)
        await conversations.update(made.id, None, "team")
        assert await conversations.forget_expired() is False
        with pytest.raises(Exception, match="there is no conversation"):
            await conversations.get(made.id, "team")
    finally:
        await store.close()
