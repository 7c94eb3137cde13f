"""``truncation="auto"`` of ``/v1/responses``, through the official SDK. The model says what the user said."""

import pytest
from openai import BadRequestError

from services.gateway.openai.messages import CalledFunction, Message, PastCall
from services.gateway.openai.truncation import droppable
from tests.gateway.test_responses import client, name, raw_events

__all__ = ["client", "name"]

TURNS = 12
FILLER = "word " * 100
TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": None, "strict": False}


@pytest.fixture(scope="module")
def context(qwen):
    return qwen.post("/tokenize", {"prompt": "Hi"}).json()["max_model_len"]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def turns(count: int) -> list[dict]:
    return [item for number in range(count) for item in (user(f"{number} {FILLER}"), assistant(f"{number} {FILLER}"))]


def tokens(qwen, *messages: dict) -> int:
    return qwen.post("/tokenize", {"messages": [*messages]}).json()["count"]


def longest(qwen, room: int, start: dict, conversation: list[dict]) -> int:
    """Return the token count of ``start`` and the most whole turns of ``conversation`` that fit into ``room``."""
    counts = [tokens(qwen, start, *conversation[at:]) for at in range(0, len(conversation), 2)]
    return max(count for count in counts if count <= room)


def test_the_oldest_turns_of_a_long_conversation_are_dropped(client, name, qwen, context):
    conversation = [*turns(2 * TURNS), user("What now?")]
    given = {"model": name, "instructions": "Be brief.", "input": conversation, "max_output_tokens": 30}
    with pytest.raises(BadRequestError) as refused:
        client.responses.create(**given)
    assert refused.value.code == "context_length_exceeded"
    response = client.responses.create(**given, truncation="auto")
    expected = longest(qwen, context - 30, {"role": "system", "content": "Be brief."}, conversation)
    assert (response.output_text, response.truncation) == ("What now?", "auto")
    assert response.usage.input_tokens == expected
    del given["max_output_tokens"]
    counted = client.responses.input_tokens.count(**given, truncation="auto")
    assert counted.input_tokens == client.responses.create(**given, truncation="auto").usage.input_tokens
    [*_, last] = raw_events(qwen, **given, truncation="auto")
    assert last["response"]["usage"]["input_tokens"] == counted.input_tokens


def test_a_conversation_that_fits_is_whole(client, name, qwen):
    conversation = [*turns(2), user("What now?")]
    response = client.responses.create(model=name, input=conversation, truncation="auto")
    assert response.usage.input_tokens == tokens(qwen, *conversation)


def test_a_conversation_that_fits_is_whole_even_if_the_answer_may_be_long(client, name, qwen, context):
    conversation = [*turns(4), user("What now?")]
    response = client.responses.create(
        model=name, input=conversation, max_output_tokens=context - 100, truncation="auto"
    )
    assert response.usage.input_tokens == tokens(qwen, *conversation) > context // 2


def test_a_shortest_answer_of_more_than_half_of_the_context_has_room(client, name, qwen, context):
    least = context - 200
    response = client.responses.create(
        model=name,
        input=[*turns(2 * TURNS), user("What now?")],
        truncation="auto",
        extra_body={"min_tokens": least},
    )
    assert response.usage.input_tokens <= 200


def test_instructions_and_messages_of_the_developer_stay(client, name, qwen, context):
    conversation = [{"role": "developer", "content": FILLER}, *turns(TURNS)]
    conversation += [{"role": "system", "content": FILLER}, *turns(TURNS), user("What now?")]
    response = client.responses.create(model=name, instructions=FILLER, input=conversation, truncation="auto")
    staying = [{"role": "system", "content": FILLER}] * 3
    kept = [tokens(qwen, *staying, *turns(2 * TURNS)[2 * at :], user("What now?")) for at in range(2 * TURNS)]
    # The margin is for turn numbers, which have one or two digits.
    assert response.usage.input_tokens == pytest.approx(max(each for each in kept if each <= context - 16), abs=TURNS)


def test_calls_are_dropped_with_their_outputs_and_the_question_stays(client, name, qwen, context):
    task = user("Look at everything.")
    calls = [
        item
        for number in range(4 * TURNS)
        for item in (
            {"type": "function_call", "call_id": f"c{number}", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"{number} {FILLER}"},
        )
    ]
    given = {"model": name, "tools": [TOOL], "input": [*turns(1), task, *calls]}
    used = client.responses.create(**given, truncation="auto").usage.input_tokens
    sizes = [
        client.responses.input_tokens.count(**(given | {"input": [task, *calls[at:]]})).input_tokens
        for at in range(0, len(calls), 2)
    ]
    assert used == max(size for size in sizes if size <= context - 16)


def test_a_conversation_that_is_too_long_after_all_drops_is_refused(client, name):
    question = user(100 * FILLER)
    with pytest.raises(BadRequestError, match="maximum context length is") as refused:
        client.responses.create(model=name, input=[*turns(1), question], truncation="auto")
    assert refused.value.param == "input"


def test_an_answer_that_may_be_long_takes_at_most_half_of_the_context(client, name, qwen, context):
    conversation = [*turns(2 * TURNS), user("What now?")]
    response = client.responses.create(model=name, input=conversation, max_output_tokens=10**6, truncation="auto")
    assert response.output_text == "What now?"
    assert context // 4 < response.usage.input_tokens <= context // 2


def test_the_whole_conversation_is_stored(client, name):
    conversation = [*turns(2 * TURNS), user("What now?")]
    first = client.responses.create(model=name, input=conversation, truncation="auto")
    stored = client.responses.input_items.list(first.id, limit=100)
    assert len(stored.data) == len(conversation)
    second = client.responses.create(model=name, input="And now?", previous_response_id=first.id, truncation="auto")
    assert second.output_text == "And now?"


def message(role: str, *calls: str, answers: str | None = None) -> Message:
    past = [PastCall(id=call, function=CalledFunction(name="look", arguments="{}")) for call in calls]
    return Message(role=role, content="x", tool_calls=past or None, tool_call_id=answers)


def test_parts_are_turns_and_then_calls_with_their_outputs():
    conversation = [
        message("system"),
        message("assistant"),  # 1: before the first question
        message("user"),  # 2
        message("assistant", "a"),
        message("tool", answers="a"),
        message("developer"),
        message("assistant"),  # 6
        message("user"),  # 7: the last question
        message("assistant", "b", "c"),  # 8
        message("tool", answers="c"),
        message("tool", answers="b"),
        message("assistant", "a"),  # 11: an id that was used before
        message("tool", answers="a"),
        message("assistant"),
        message("assistant", "d"),  # 14
        message("tool", answers="d"),
    ]
    assert droppable(conversation) == [{1}, {2, 3, 4, 6}, {8, 9, 10}, {11, 12}, {13}]


def test_an_output_after_the_last_question_keeps_its_call():
    conversation = [message("user"), message("assistant", "a"), message("user"), message("tool", answers="a")]
    assert droppable(conversation) == [{0}]


def test_the_last_message_is_not_droppable():
    assert droppable([message("system"), message("user")]) == []
    assert droppable([message("assistant"), message("assistant")]) == [{0}]
