"""What the answer of a conversation has to match: as over HTTP, thoughts and calls included."""

import re
from collections import Counter

import pytest

from services.client import LLM, SamplingParams
from services.client.request import ClientRequest, check, prepare
from services.common.config import GatewayConfig
from services.common.errors import InvalidValue
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.codec import ModelFacts
from services.gateway.engine.text import TextEngine
from services.gateway.openai.compiler import RequestCompiler
from services.gateway.openai.output.formats import OutputFormats
from tests.gateway.parrot import QWEN, start_parrot

FORM = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
}
THINKING = {"chat_template_kwargs": {"open_thoughts": True}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>'


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    running = start_parrot(directory, QWEN)
    running.model = str(directory / "parrot")
    yield running
    running.stop()


@pytest.fixture(scope="module")
def llm(parrot):
    with LLM(parrot.model, address=parrot.scheduler_address) as made:
        yield made


def say(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def weather(*, strict: bool) -> dict:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    return {"type": "function", "function": {"name": "weather", "strict": strict, "parameters": parameters}}


def test_thoughts_come_before_what_the_answer_matches(llm):
    params = SamplingParams(response_format=FORM, max_tokens=60)
    said = 'Hm, well, let me see.</think>{"ok": true}'
    [thinking] = llm.chat(say(said), params, **THINKING)
    assert thinking.text == said[-len(thinking.text) :]  # the parrot counts what the template opens
    assert "see.</think>" in thinking.text
    [plain] = llm.chat(say(said), params, chat_template_kwargs={"enable_thinking": False})
    assert plain.text.lstrip().startswith("{")


def test_calls_of_strict_tools_are_held_to_them(llm):
    params = SamplingParams(max_tokens=60)
    [free] = llm.chat(say(CALL), params, tools=[weather(strict=False)])
    assert free.text == CALL
    [held] = llm.chat(say(CALL), params, tools=[weather(strict=True)])
    assert held.error is None
    assert re.search(r'"city":\s*"', held.text), held.text


def test_what_does_not_go_with_strict_tools_is_named(llm):
    [output] = llm.chat(say("x"), SamplingParams(ignore_eos=True, max_tokens=3), tools=[weather(strict=True)])
    assert (type(output.error), output.error.field) == (InvalidValue, "ignore_eos")


async def test_flags_say_how_a_model_thinks_as_for_a_gateway(parrot):
    text = TextEngine(Tokenizer.load(parrot.model))
    facts = ModelFacts("m", 0, 2048, 2048, True, 20, "", "1.1", grammars=True)
    params = SamplingParams(response_format=FORM)
    composed = []
    for parser in ("auto", "none"):
        formats = OutputFormats.of(GatewayConfig(reasoning_parser=parser), text.tokenizer)
        compiler, asked = RequestCompiler(text, formats, facts), [ClientRequest(None, params, say("x"))]
        [prepared] = await prepare(compiler, asked, await check(compiler, asked), Counter())
        composed.append(prepared.prompt.settings.grammar.composed)
    text.stop()
    assert composed == [True, False]


def test_many_prompts_with_a_large_grammar_take_turns(llm):
    texts = [f"{number:060}" for number in range(3000)]
    params = SamplingParams(structured_outputs={"choice": texts}, max_tokens=2)
    outputs = llm.generate(["a"] * 300, params)
    assert [output.error for output in outputs] == [None] * 300
