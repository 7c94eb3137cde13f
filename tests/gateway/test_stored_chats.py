"""Chat completions that are stored, through the official SDK. The model says what the user said."""

import json
from itertools import islice

import openai
import pytest
from sqlalchemy import Engine, event

from services.gateway.store import chats as records
from services.gateway.store.chats import ChatFilter, Chats
from services.gateway.store.database import Store
from tests.gateway.batch.conftest import store_url as store_url
from tests.gateway.batch.requests import CHAT, begin, ended, line, results
from tests.gateway.test_errors import error_of
from tests.gateway.test_responses import client as client
from tests.gateway.test_responses import name as name
from tests.gateway.test_tools import CALL, THOUGHT, TOOLS


def say(client, name, text: str, **more):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    return client.chat.completions.create(model=name, messages=messages, store=True, **more)


def test_a_chat_completion_is_stored_until_it_is_deleted(client, name):
    made = say(client, name, "One", metadata={"a": "b"})
    told = client.chat.completions.retrieve(made.id)
    assert told.to_dict() == made.to_dict() | {"metadata": {"a": "b"}}
    assert client.chat.completions.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    deleted = client.chat.completions.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "chat.completion.deleted", True)
    for ask in (
        client.chat.completions.retrieve,
        client.chat.completions.delete,
        client.chat.completions.messages.list,
        lambda each: client.chat.completions.update(each, metadata={}),
    ):
        with pytest.raises(openai.NotFoundError, match="was not stored with store=true") as caught:
            ask(made.id)
        assert caught.value.code == "chat_completion_not_found"


def test_without_store_nothing_is_kept(client, name):
    made = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "Hi"}], metadata={"a": "b"})
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(made.id)


@pytest.mark.parametrize("text", ["One", THOUGHT + "One", CALL], ids=["words", "thoughts", "call"])
def test_a_stream_is_stored_as_the_whole_is(client, name, text):
    more = {"tools": TOOLS, "logprobs": True, "top_logprobs": 1, "n": 2, "extra_body": {"return_token_ids": True}}
    whole = client.chat.completions.retrieve(say(client, name, text, **more).id).to_dict()
    chunks = list(say(client, name, text, stream=True, stream_options={"include_usage": True}, **more))
    told = client.chat.completions.retrieve(chunks[0].id).to_dict()
    ids = [call.id for chunk in chunks for each in chunk.choices for call in each.delta.tool_calls or () if call.id]
    kept = [call["id"] for choice in told["choices"] for call in choice["message"].get("tool_calls") or ()]
    assert sorted(kept) == sorted(ids)
    for each in (whole, told):
        each.pop("created")
        each.pop("id")
        each["usage"].pop("timing", None)
        each["usage"].pop("prompt_tokens_details")
        for choice in each["choices"]:
            for call in choice["message"].get("tool_calls") or ():
                call.pop("id")
    assert told == whole


def test_the_messages_of_a_chat_completion_are_listed(client, name):
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}]
    past = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [past]},
        {"role": "tool", "content": "9", "tool_call_id": "c"},
        {"role": "user", "content": parts, "name": "Ada"},
    ]
    made = client.chat.completions.create(model=name, messages=messages, store=True)
    told = list(client.chat.completions.messages.list(made.id, limit=1))
    assert [message.role for message in told] == ["system", "assistant", "tool", "user"]
    assert [message.content for message in told] == ["Be brief.", None, "9", "OneTwo"]
    assert told[1].tool_calls[0].function.name == "clock"
    assert [part.text for part in told[3].content_parts] == ["One", "Two"]
    assert told[0].content_parts is None
    newest = client.chat.completions.messages.list(made.id, order="desc").data
    assert [message.id for message in newest] == [message.id for message in told[::-1]]
    with pytest.raises(openai.BadRequestError, match="no such item"):
        client.chat.completions.messages.list(made.id, after="x")


def test_an_id_that_the_client_gives_a_message_does_not_replace_the_stored_id(client, name):
    own = {"id": "same", "content_parts": "none"}
    messages = [{"role": role, "content": "Hi"} | own for role in ("user", "assistant", "user")]
    made = client.chat.completions.create(model=name, messages=messages, store=True)
    told = list(islice(client.chat.completions.messages.list(made.id, limit=1), 4))  # equal ids would never end
    assert [message.id for message in told] == [f"{made.id}-{number}" for number in range(3)]
    assert [message.content_parts for message in told] == [None] * 3


def test_chat_completions_are_listed_by_model_and_metadata(client, name):
    made = [say(client, name, str(number), metadata={"run": "list", "number": str(number)}).id for number in range(3)]
    listed = client.chat.completions.list(metadata={"run": "list"}, limit=2)
    assert [each.id for each in listed.data] == made[:2]
    assert listed.has_more
    assert [each.id for each in client.chat.completions.list(metadata={"run": "list"}, limit=2)] == made
    newest = client.chat.completions.list(metadata={"run": "list"}, order="desc")
    assert [each.id for each in newest] == made[::-1]
    both = client.chat.completions.list(metadata={"run": "list", "number": "1"}, model=name)
    assert [each.id for each in both] == made[1:2]
    assert client.chat.completions.list(model="another", metadata={"run": "list"}).data == []
    with pytest.raises(openai.BadRequestError, match="quotation marks"):
        client.chat.completions.list(metadata={'a"b': "c"})
    with pytest.raises(openai.BadRequestError, match="no such chat completion"):
        client.chat.completions.list(after="chatcmpl-x")


def test_a_request_that_is_sent_again_is_stored_once(client, name):
    ask = {"metadata": {"run": "again"}, "extra_headers": {"Idempotency-Key": "chat-1"}}
    first = say(client, name, "One", **ask)
    assert say(client, name, "One", **ask).id == first.id
    streamed = list(say(client, name, "One", stream=True, **ask | {"extra_headers": {"Idempotency-Key": "chat-2"}}))
    repeated = list(say(client, name, "One", stream=True, **ask | {"extra_headers": {"Idempotency-Key": "chat-2"}}))
    assert streamed[0].id == repeated[0].id
    assert len(list(client.chat.completions.list(metadata={"run": "again"}))) == 2


def test_lines_of_a_batch_and_of_a_list_may_ask_to_be_stored(deployment, sdk):
    label = {"run": "lines"}
    batch = ended(sdk, begin(sdk, [line("a", CHAT, store=True, metadata=label)], CHAT))
    assert [each["response"]["status_code"] for each in results(sdk, batch.output_file_id)] == [200]
    assert sdk.chat.completions.list(metadata=label).data == []  # the batch has it
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "store": True, "metadata": label}
    headers = {"Idempotency-Key": "list-1"}
    answers = sdk.post("/chat/completions/batch", body=[body, body], cast_to=object, options={"headers": headers})
    assert {each["id"] for each in answers} == {each.id for each in sdk.chat.completions.list(metadata=label)}


def test_without_a_store_a_chat_completion_that_is_to_be_stored_is_refused(bare):
    error = error_of(bare.chat(store=True, max_tokens=2), 400)
    assert (error["param"], "store_url=none" in error["message"]) == ("store", True)
    assert bare.chat(store=False, max_tokens=2).status_code == 200


def test_metadata_that_the_store_cannot_keep_is_named(qwen):
    assert error_of(qwen.chat(store=True, metadata={"a": "\0"}), 400)["param"] == "metadata"


async def test_only_the_list_of_messages_reads_messages(store_url):
    store = await Store.open(store_url)
    statements: list[str] = []

    def note(connection, cursor, statement, *_) -> None:
        statements.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        chats = Chats(store)
        await chats.keep("chatcmpl-1", b"{}", b"[1]", "m", None, "")
        statements.clear()
        [chat], _ = await chats.page("", ChatFilter(), after=None, limit=1, newest_first=True)
        await chats.get("chatcmpl-1", "")
        await chats.update("chatcmpl-1", {"a": "b"}, "")
        assert chat.body == b"{}"
        assert [each for each in statements if "body" in each]
        assert not [each for each in statements if "items" in each]
        assert await chats.messages("chatcmpl-1", "") == b"[1]"
        await chats.delete("chatcmpl-1", "")
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        await store.close()


async def test_chat_completions_are_forgotten_when_their_time_is_over(store_url, monkeypatch):
    store = await Store.open(store_url)
    try:
        chats, body = Chats(store), json.dumps({"id": "chatcmpl-1"}).encode()
        await chats.keep("chatcmpl-1", body, b"[]", "m", {"a": "b", 'c"d': "e"}, "team")
        assert (await chats.page("team", ChatFilter("m", {"a": "b"}), after=None, limit=1, newest_first=True))[0]
        assert not (await chats.page("team", ChatFilter(None, {"a": "c"}), after=None, limit=1, newest_first=True))[0]
        assert not (await chats.page("other", ChatFilter(), after=None, limit=1, newest_first=False))[0]
        with pytest.raises(Exception, match="there is no chat completion"):
            await chats.get("chatcmpl-1", "other")
        monkeypatch.setattr(records, "now", lambda: 2**40)
        assert await chats.forget_expired() is False
        monkeypatch.undo()
        with pytest.raises(Exception, match="there is no chat completion"):
            await chats.get("chatcmpl-1", "team")
    finally:
        await store.close()
