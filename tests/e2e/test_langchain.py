"""LangChain's ChatOpenAI against our servers. Needs ``pip install 'tokasaurus[ecosystem]'``."""

import asyncio
from functools import reduce
from operator import add

import pytest
from pydantic import BaseModel

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")  # what others warn of each other is not ours

QUESTION = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: where
    """
    return f"It rains in {city}."


class City(BaseModel):
    """A place."""

    name: str
    people: int


def chat(base_url: str, **settings):
    return langchain_openai.ChatOpenAI(
        base_url=f"{base_url}/v1", api_key="none", model="tokasaurus-builtin", temperature=0, max_retries=0, **settings
    )


@pytest.fixture
def model(builtin_server):
    return chat(builtin_server.base_url, max_tokens=40)


@pytest.fixture
def echo(parrot):
    with parrot.sdk() as client:
        name = client.models.list().data[0].id
    return chat(parrot.url).model_copy(update={"model_name": name})


def test_invoke_answers_with_usage_and_a_reason_to_end(model):
    answer = model.invoke([SystemMessage("You count."), HumanMessage(QUESTION)])
    assert answer.content
    usage = answer.usage_metadata
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert answer.response_metadata["finish_reason"] in ("stop", "length")


def test_a_stream_adds_up_to_the_answer(model):
    chunks = list(model.stream(QUESTION, stream_usage=True))
    whole = reduce(add, chunks)
    answer = model.invoke(QUESTION)
    assert len(chunks) > 2
    assert (whole.content, whole.usage_metadata["output_tokens"]) == (
        answer.content,
        answer.usage_metadata["output_tokens"],
    )


def test_a_batch_is_answered_in_order(model):
    questions = [f"Question: What is {number} plus {number}?\nAnswer:" for number in range(12)]
    together = [answer.content for answer in model.batch(questions)]
    assert together == [model.invoke(question).content for question in questions]
    assert [answer.content for answer in asyncio.run(model.abatch(questions))] == together


def test_stop_and_logprobs(model):
    answer = model.bind(stop=[" "], logprobs=True, top_logprobs=3).invoke(QUESTION)
    assert " " not in answer.content
    tokens = answer.response_metadata["logprobs"]["content"]
    assert tokens
    assert all(len(token["top_logprobs"]) == 3 for token in tokens)


def test_a_wrong_setting_is_an_error_that_names_it(builtin_server):
    with pytest.raises(Exception, match="top_p"):
        chat(builtin_server.base_url, top_p=7).invoke("Hi")


@pytest.mark.parametrize("streamed", [False, True])
def test_bound_tools_are_called(echo, streamed):
    bound = echo.bind_tools([weather])
    answer = reduce(add, bound.stream(CALL)) if streamed else bound.invoke(CALL)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Köln"})
    assert not answer.invalid_tool_calls


def test_a_conversation_goes_on_behind_a_tool(echo):
    bound = echo.bind_tools([weather])
    asked = bound.invoke(CALL)
    (call,) = asked.tool_calls
    told = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    answer = bound.invoke([HumanMessage(CALL), AIMessage("", tool_calls=asked.tool_calls), told, HumanMessage("Rain.")])
    assert (answer.content, answer.tool_calls) == ("Rain.", [])


def test_structured_output_is_an_object(builtin_server):
    city = chat(builtin_server.base_url, max_tokens=200).with_structured_output(City, method="json_schema")
    assert isinstance(city.invoke("Name a city."), City)


def test_structured_output_by_a_tool_is_an_object(echo):
    city = echo.with_structured_output(City, method="function_calling")
    call = '<tool_call>\n{"name": "City", "arguments": {"name": "Köln", "people": 1087353}}\n</tool_call>'
    assert city.invoke(call) == City(name="Köln", people=1087353)
