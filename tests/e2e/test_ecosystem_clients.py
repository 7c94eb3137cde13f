"""litellm and huggingface_hub against our servers. litellm needs ``pip install 'tokasaurus[ecosystem]'``."""

import json
import os

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from tests.e2e.ecosystem import (
    CALL,
    CITY_FORMAT,
    CITY_TEXT,
    CONTEXT_MESSAGE,
    GREETING,
    REPORT,
    TOO_LONG,
    WEATHER_TOOL,
    WRONG_CITY_TEXT,
    City,
    user,
)

pytestmark = pytest.mark.filterwarnings("default")  # other projects' warnings


@pytest.fixture(scope="package")  # as `parrot`, which then does not start if the test is skipped
def litellm():
    """Return the module, or skip. It must not download its price list when it is imported."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    return pytest.importorskip("litellm", reason="litellm is not installed")


@pytest.fixture(params=["openai", "hosted_vllm"])
def complete(request, litellm, parrot):
    """Return litellm's ``completion`` for our server, as an OpenAI server and as a vLLM server."""

    def complete(content: str, **settings):
        return litellm.completion(
            model=f"{request.param}/llm",
            api_base=f"{parrot.url}/v1",
            api_key="none",
            messages=user(content),
            max_retries=0,
            **settings,
        )

    return complete


def test_litellm_chats(complete):
    answer = complete(GREETING, temperature=0)
    assert answer.choices[0].message.content == GREETING
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_litellm_streams(complete):
    chunks = list(complete(GREETING, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == GREETING
    assert chunks[-1].usage.completion_tokens > 2


def test_litellm_calls_tools(complete, litellm):
    (call,) = complete(CALL, tools=[WEATHER_TOOL]).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
    chunks = list(complete(CALL, tools=[WEATHER_TOOL], stream=True))
    (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})


@pytest.mark.parametrize("said", [CITY_TEXT, WRONG_CITY_TEXT])
def test_litellm_gets_an_object_of_the_schema(complete, said):
    answer = complete(said, response_format=City, max_tokens=100)
    city = City.model_validate_json(answer.choices[0].message.content)
    assert said != CITY_TEXT or city == City.model_validate_json(CITY_TEXT)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_recognises_a_full_context(complete, litellm, stream):
    with pytest.raises(litellm.ContextWindowExceededError, match=CONTEXT_MESSAGE):
        complete(TOO_LONG, stream=stream)


@pytest.fixture
def hub(parrot):
    return InferenceClient(base_url=f"{parrot.url}/v1", api_key="none", timeout=60)


def test_huggingface_hub_chats_and_streams(hub):
    assert hub.chat_completion(user(GREETING), max_tokens=100).choices[0].message.content == GREETING
    chunks = list(hub.chat_completion(user(GREETING), max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == GREETING


def test_huggingface_hub_calls_tools(hub):
    answer = hub.chat_completion(user(CALL), tools=[WEATHER_TOOL], tool_choice="auto").choices[0]
    (call,) = answer.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
    assistant = {"role": "assistant", "content": "", "tool_calls": [call]}
    told = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    answer = hub.chat_completion([*user(CALL), assistant, told], tools=[WEATHER_TOOL])
    assert answer.choices[0].message.content == REPORT


@pytest.mark.parametrize("said", [CITY_TEXT, WRONG_CITY_TEXT])
def test_huggingface_hub_gets_an_object_of_the_schema(hub, said):
    answer = hub.chat_completion(user(said), response_format=CITY_FORMAT, max_tokens=100)
    city = City.model_validate_json(answer.choices[0].message.content)
    assert said != CITY_TEXT or city == City.model_validate_json(CITY_TEXT)


def test_huggingface_hub_reports_a_full_context(hub):
    with pytest.raises(HfHubHTTPError, match=CONTEXT_MESSAGE):
        hub.chat_completion(user(TOO_LONG))
