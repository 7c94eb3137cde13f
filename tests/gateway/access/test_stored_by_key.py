"""Stored conversations, chat completions and background responses: whose they are, and what they take of a key."""

import openai
import pytest

from tests.gateway.access.conftest import start
from tests.gateway.deployment import eventually

ENDLESS = 1900  # tokens that the slow deployment generates in half a minute
CHAT = {"model": "tokasaurus-builtin", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
RESPONSE = {"model": "tokasaurus-builtin", "input": "Hi"}


@pytest.fixture(scope="module")
def slow(tmp_path_factory):
    made = start(tmp_path_factory.mktemp("slow"), step_ms=15)
    yield made
    made.running.stop()


def test_what_one_key_stored_is_not_there_for_another(guarded):
    mine, other = guarded.sdk("team"), guarded.sdk("other")
    conversation = mine.conversations.create(items=[{"role": "user", "content": "Hi"}])
    [item] = mine.conversations.items.list(conversation.id).data
    chat = mine.chat.completions.create(**CHAT, store=True, metadata={"a": "b"})
    answer = mine.responses.create(**RESPONSE, max_output_tokens=2, background=True)
    for ask in (
        lambda: other.conversations.retrieve(conversation.id),
        lambda: other.conversations.update(conversation.id, metadata={}),
        lambda: other.conversations.delete(conversation.id),
        lambda: other.conversations.items.list(conversation.id),
        lambda: other.conversations.items.create(conversation.id, items=[{"role": "user", "content": "x"}]),
        lambda: other.conversations.items.retrieve(item.id, conversation_id=conversation.id),
        lambda: other.conversations.items.delete(item.id, conversation_id=conversation.id),
        lambda: other.chat.completions.retrieve(chat.id),
        lambda: other.chat.completions.update(chat.id, metadata={}),
        lambda: other.chat.completions.delete(chat.id),
        lambda: other.chat.completions.messages.list(chat.id),
        lambda: other.responses.retrieve(answer.id),
        lambda: other.responses.retrieve(answer.id, stream=True),
        lambda: other.responses.cancel(answer.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert other.chat.completions.list().data == []
    for more in ({"conversation": conversation.id}, {"input": [{"type": "item_reference", "id": item.id}]}):
        with pytest.raises(openai.BadRequestError, match="there is no"):
            other.responses.create(**RESPONSE | more)
    assert len(mine.conversations.items.list(conversation.id).data) == 1
    assert [each.id for each in mine.chat.completions.list(metadata={"a": "b"})] == [chat.id]
    said = mine.responses.retrieve(answer.id)
    eventually(lambda: mine.responses.retrieve(said.id).status == "incomplete")
    reference = {"type": "item_reference", "id": mine.responses.retrieve(said.id).output[0].id}
    with pytest.raises(openai.BadRequestError, match="there is no stored item"):
        other.responses.create(model="tokasaurus-builtin", input=[reference, {"role": "user", "content": "x"}])


def test_a_background_response_is_a_running_request_of_its_key(slow):
    client = slow.sdk("one-at-once")
    made = client.responses.create(**RESPONSE, max_output_tokens=ENDLESS, background=True)
    with pytest.raises(openai.RateLimitError, match="are running"):
        client.chat.completions.create(**CHAT)
    with pytest.raises(openai.RateLimitError, match="are running"):
        client.responses.create(**RESPONSE, max_output_tokens=2, background=True)
    assert client.responses.cancel(made.id).status == "cancelled"
    eventually(lambda: _runs(client))


def _runs(client) -> bool:
    try:
        return bool(client.chat.completions.create(**CHAT))
    except openai.RateLimitError:
        return False


@pytest.mark.slow
def test_a_background_response_takes_its_keys_tokens(slow):
    client = slow.sdk("thrifty")
    with pytest.raises(openai.BadRequestError, match="300 a minute"):
        client.responses.create(**RESPONSE, max_output_tokens=400, background=True)
    made = client.responses.create(**RESPONSE, max_output_tokens=200, background=True)
    with pytest.raises(openai.RateLimitError, match="tokens a minute left"):
        client.responses.create(**RESPONSE, max_output_tokens=200, background=True)
    eventually(lambda: client.responses.retrieve(made.id).status == "incomplete")
