"""openai-agents and pydantic-ai against our servers. They need ``pip install 'tokasaurus[ecosystem]'``."""

import openai
import pytest

from tests.e2e.ecosystem import (
    CALL,
    CITY_TEXT,
    CONTEXT_MESSAGE,
    GREETING,
    REPORT,
    TOO_LONG,
    WRONG_CITY_TEXT,
    City,
    weather,
)

pytestmark = pytest.mark.filterwarnings("default")  # other projects' warnings


@pytest.fixture(scope="package")  # as `parrot`, which then does not start if the test is skipped
def agents():
    module = pytest.importorskip("agents", reason="openai-agents is not installed")
    module.set_tracing_disabled(True)  # it would send traces to OpenAI
    return module


@pytest.fixture(params=["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
async def agents_model(request, agents, parrot):
    """Return a model of openai-agents that calls our server's chat completions or responses."""
    async with parrot.async_sdk() as client:
        yield getattr(agents, request.param)(model="llm", openai_client=client)


async def test_openai_agents_chat(agents, agents_model):
    agent = agents.Agent(name="Parrot", instructions="Repeat.", model=agents_model)
    assert (await agents.Runner.run(agent, GREETING)).final_output == GREETING


async def test_openai_agents_stream(agents, agents_model):
    run = agents.Runner.run_streamed(agents.Agent(name="Parrot", model=agents_model), GREETING)
    raw = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
    deltas = [event.delta for event in raw if event.type == "response.output_text.delta"]
    assert ("".join(deltas), run.final_output) == (GREETING, GREETING)


@pytest.mark.parametrize("streamed", [False, True])
async def test_openai_agents_call_tools_and_continue(agents, agents_model, streamed):
    agent = agents.Agent(name="Parrot", model=agents_model, tools=[agents.function_tool(weather)])
    if streamed:
        run = agents.Runner.run_streamed(agent, CALL)
        assert [event async for event in run.stream_events()]
    else:
        run = await agents.Runner.run(agent, CALL)
    assert run.final_output == REPORT


@pytest.mark.parametrize("said", [CITY_TEXT, WRONG_CITY_TEXT])
async def test_openai_agents_get_an_object_of_the_schema(agents, agents_model, said):
    settings = agents.ModelSettings(max_tokens=100)
    agent = agents.Agent(name="Parrot", model=agents_model, model_settings=settings, output_type=City)
    city = (await agents.Runner.run(agent, said)).final_output
    assert isinstance(city, City)
    assert said != CITY_TEXT or city == City.model_validate_json(CITY_TEXT)


async def test_openai_agents_report_a_full_context(agents, agents_model):
    with pytest.raises(openai.BadRequestError, match=CONTEXT_MESSAGE) as caught:
        await agents.Runner.run(agents.Agent(name="Parrot", model=agents_model), TOO_LONG)
    assert caught.value.code == "context_length_exceeded"


@pytest.fixture(scope="package")
def pydantic_ai():
    return pytest.importorskip("pydantic_ai", reason="pydantic-ai is not installed")


@pytest.fixture(params=["OpenAIChatModel", "OpenAIResponsesModel"])
async def typed_model(request, pydantic_ai, parrot):
    """Return a model of pydantic-ai that calls our server's chat completions or responses."""
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    async with parrot.async_sdk() as client:
        yield getattr(models, request.param)("llm", provider=OpenAIProvider(openai_client=client))


async def test_pydantic_ai_chats(pydantic_ai, typed_model):
    answer = await pydantic_ai.Agent(typed_model, instructions="Repeat.").run(GREETING)
    assert answer.output == GREETING
    assert answer.usage.output_tokens > 2


async def test_pydantic_ai_streams(pydantic_ai, typed_model):
    async with pydantic_ai.Agent(typed_model).run_stream(GREETING) as run:
        deltas = [delta async for delta in run.stream_text(delta=True, debounce_by=None)]
    assert "".join(deltas) == GREETING


async def test_pydantic_ai_calls_tools_and_continues(pydantic_ai, typed_model):
    agent = pydantic_ai.Agent(typed_model, tools=[weather])
    assert (await agent.run(CALL)).output == REPORT


@pytest.mark.parametrize("said", [CITY_TEXT, WRONG_CITY_TEXT])
async def test_pydantic_ai_gets_an_object_of_the_schema(pydantic_ai, typed_model, said):
    agent = pydantic_ai.Agent(typed_model, output_type=pydantic_ai.NativeOutput(City, strict=True), retries=0)
    city = (await agent.run(said, model_settings={"max_tokens": 100})).output
    assert isinstance(city, City)
    assert said != CITY_TEXT or city == City.model_validate_json(CITY_TEXT)


async def test_pydantic_ai_gets_an_object_by_a_tool_call(pydantic_ai, typed_model):
    agent = pydantic_ai.Agent(typed_model, output_type=pydantic_ai.ToolOutput(City, name="city"), retries=0)
    answer = await agent.run(f'<tool_call>\n{{"name": "city", "arguments": {CITY_TEXT}}}\n</tool_call>')
    assert answer.output == City.model_validate_json(CITY_TEXT)


async def test_pydantic_ai_reports_a_full_context(pydantic_ai, typed_model):
    with pytest.raises(pydantic_ai.ModelHTTPError, match=CONTEXT_MESSAGE) as caught:
        await pydantic_ai.Agent(typed_model).run(TOO_LONG)
    assert caught.value.status_code == 400
    assert caught.value.body["code"] == "context_length_exceeded"
