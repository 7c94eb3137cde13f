"""Tool calls and reasoning through the official SDK. The model says what the user said."""

import json

import openai
import pytest

from services.common.config import GatewayConfig
from services.common.text.tokenizer import Tokenizer
from services.gateway.openai.output.calls import HERMES, LLAMA3
from services.gateway.openai.output.formats import OutputFormats
from tests.gateway.parrot import LLAMA, QWEN, make_model, start_parrot
from tests.gateway.test_errors import error_of
from tests.gateway.test_streaming import events
from tests.gateway.test_templates import rendered

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Köln"}}'
PAST_CALL = {"function": {"name": "clock", "arguments": "{}"}}
THOUGHT = "<think>\nIs it cold?\n</think>\n\n"
# Without <|end|>, which is the end of answers of the built-in model.
CHANNELS = "<|channel|>analysis<|message|>Is it cold?<|start|>assistant<|channel|>final<|message|>It is."
GPT_OSS = LLAMA.replace("ipython", "tool") + "{# <|start|>assistant<|channel|>final<|message|> #}"


def saying(text: str, **body) -> dict:
    return {"messages": [{"role": "user", "content": text}]} | body


def first(deployment, text: str, **body):
    """The first choice of an answer, as the SDK has it."""
    with deployment.sdk() as client:
        model = client.models.list().data[0].id
        return client.chat.completions.create(model=model, **saying(text, **body)).choices[0]


def streamed(deployment, text: str, **body):
    """The same, put together by the SDK from a stream."""
    with deployment.sdk() as client:
        model = client.models.list().data[0].id
        with client.chat.completions.stream(model=model, **saying(text, **body)) as stream:
            stream.until_done()
            return stream.get_final_completion().choices[0]


@pytest.mark.parametrize("ask", [first, streamed])
def test_a_call_in_the_hermes_format(qwen, ask):
    choice = ask(qwen, f"Let me see.\n{CALL}\n", tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "weather", '{"city": "Köln"}')
    assert call.id.startswith("call_")


@pytest.mark.parametrize("ask", [first, streamed])
def test_calls_in_the_llama_format(llama, ask):
    choice = ask(llama, f'{LLAMA_CALL}; {{"name": "clock", "parameters": {{}}}}', tools=TOOLS)
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Köln"}),
        ("clock", {}),
    ]
    assert len({call.id for call in calls}) == 2


@pytest.mark.parametrize("ask", [first, streamed])
def test_two_calls_or_one_as_wanted(qwen, ask):
    assert len(ask(qwen, f"{CALL}\n{CALL}", tools=TOOLS).message.tool_calls) == 2
    assert len(ask(qwen, f"{CALL}\n{CALL}", tools=TOOLS, parallel_tool_calls=False).message.tool_calls) == 1


@pytest.mark.parametrize("ask", [first, streamed])
@pytest.mark.parametrize("body", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_the_text_is_all(qwen, ask, body):
    choice = ask(qwen, CALL, **body)
    assert (choice.message.content, choice.message.tool_calls or None, choice.finish_reason) == (CALL, None, "stop")


@pytest.mark.parametrize("text", ["Yes.", "<tool_call>no</tool_call>", "a <tool_call", '<tool_call>{"name": "x", "ar'])
@pytest.mark.parametrize("ask", [first, streamed])
def test_what_is_no_call_is_text(qwen, ask, text):
    choice = ask(qwen, text, tools=TOOLS)
    assert (choice.message.content, choice.message.tool_calls or None, choice.finish_reason) == (text, None, "stop")


def test_a_call_that_is_cut_keeps_its_beginning(qwen):
    choice = first(qwen, CALL, tools=TOOLS, max_tokens=40)
    assert choice.finish_reason == "length"
    assert '{"city": "Köln"}'.startswith(choice.message.tool_calls[0].function.arguments)


@pytest.mark.parametrize("ask", [first, streamed])
@pytest.mark.parametrize("form", ["qwen", "llama"])
def test_a_call_that_a_stop_string_cuts_asks_for_no_result(request, form, ask):
    deployment, call = request.getfixturevalue(form), CALL if form == "qwen" else LLAMA_CALL
    cut = ask(deployment, f"{call}\n{call}" if form == "qwen" else f"{call}; {call}", tools=TOOLS, stop="ln")
    assert cut.finish_reason == "stop"
    assert [called.function.arguments for called in cut.message.tool_calls] == ['{"city": "Kö']
    whole = ask(deployment, f"{call} Done.", tools=TOOLS, stop="Do")
    assert whole.finish_reason == "tool_calls"
    assert [called.function.arguments for called in whole.message.tool_calls] == ['{"city": "Köln"}']


def test_a_stream_says_the_name_once_and_never_a_mark(qwen):
    chunks = events(qwen, "/v1/chat/completions", **saying(f"So: {CALL}{CALL}", tools=TOOLS, n=2, logprobs=True))
    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        deltas = [choice["delta"] for choice in mine]
        assert "".join(delta.get("content", "") for delta in deltas) == "So:"
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["index"] for call in calls if "id" in call] == [0, 1]
        for number in (0, 1):
            functions = [call["function"] for call in calls if call["index"] == number]
            assert [function.get("name") for function in functions] == ["weather"] + [None] * (len(functions) - 1)
            assert "".join(function["arguments"] for function in functions) == '{"city": "Köln"}'
        assert [choice["finish_reason"] for choice in mine] == [None] * (len(mine) - 1) + ["tool_calls"]
        assert deltas[-1] == {}
        tokens = [entry["token"] for choice in mine for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert "".join(tokens).startswith("So: <tool_call>")


def test_tools_and_past_calls_are_rendered_by_the_template(qwen):
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "CET"}'}}
    messages = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
    ]
    assert rendered(qwen, messages=messages, tools=TOOLS) == (
        f"<|system|># Tools\n{json.dumps(WEATHER)}\n{json.dumps(CLOCK)}\n"
        'Call one so: <tool_call>{"name": ..., "arguments": ...}</tool_call><|end|>'
        "<|user|>What time is it?<|end|>"
        '<|assistant|><think>Hm.</think><tool_call>{"name": "clock", "arguments": {"zone": "CET"}}</tool_call><|end|>'
        "<|user|>noon<|end|><|assistant|>"
    )
    with qwen.sdk() as client:
        answer = client.chat.completions.create(model=client.models.list().data[0].id, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "noon"


def test_arguments_that_were_no_json_stay_as_they_were(qwen):
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{oops"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "error"}]
    assert '"arguments": "{oops"}' in rendered(qwen, messages=messages)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "cuckoo"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tools": TOOLS, "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "tool"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [PAST_CALL]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)  # fmt: skip
def test_what_tools_cannot_be_is_named(qwen, body, param):
    assert error_of(qwen.chat(**body), 400)["param"] == param


def test_a_template_without_tools_refuses_them(deployment, sdk, model):
    with pytest.raises(openai.BadRequestError, match="tool"):
        sdk.chat.completions.create(model=model, messages=saying("x")["messages"], tools=TOOLS)


def usage(deployment, text: str, **body):
    with deployment.sdk() as client:
        model = client.models.list().data[0].id
        return client.chat.completions.create(model=model, **saying(text, **body)).usage


@pytest.mark.parametrize("ask", [first, streamed])
def test_thoughts_are_apart_from_the_answer(qwen, ask):
    message = ask(qwen, THOUGHT + "It is.").message
    assert (message.reasoning_content, message.content) == ("Is it cold?", "It is.")


@pytest.mark.parametrize("ask", [first, streamed])
def test_a_prompt_may_open_the_thoughts(qwen, ask):
    body = {"extra_body": {"chat_template_kwargs": {"open_thoughts": True}}}
    message = ask(qwen, THOUGHT + "It is.", **body).message
    assert (message.reasoning_content, message.content) == ("Is it cold?", "It is.")


@pytest.mark.parametrize("ask", [first, streamed])
def test_thinking_may_be_turned_off(qwen, ask):
    body = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    message = ask(qwen, "<think>\n\n</think>\n\nIt is.", **body).message
    assert message.content == "It is."
    assert getattr(message, "reasoning_content", None) is None


@pytest.mark.parametrize("ask", [first, streamed])
def test_a_call_may_follow_thoughts(qwen, ask):
    choice = ask(qwen, THOUGHT + CALL, tools=TOOLS)
    assert choice.message.reasoning_content == "Is it cold?"
    assert not choice.message.content
    assert choice.message.tool_calls[0].function.name == "weather"
    assert choice.finish_reason == "tool_calls"


def test_tokens_of_thoughts_are_counted(qwen, tokenizer):
    thought = len(tokenizer.encode(THOUGHT.rstrip(), add_special_tokens=False))
    told = usage(qwen, THOUGHT + "It is.", n=2)
    assert abs(told.completion_tokens_details.reasoning_tokens - 2 * thought) <= 2
    assert usage(qwen, "It is.").completion_tokens_details is None
    chunks = events(
        qwen, "/v1/chat/completions", **saying(THOUGHT + "It is.", n=2, stream_options={"include_usage": True})
    )
    assert chunks[-1]["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": told.completion_tokens_details.reasoning_tokens
    }


@pytest.mark.parametrize(
    ("parameters", "part"),
    [
        ({"type": "array"}, "are not of type 'object'"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, 'Unimplemented keys: ["not"]'),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}}, "does not exist"),
    ],
)
def test_parameters_that_cannot_be_followed_are_named(qwen, llama, parameters, part):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    strict = {"type": "function", "function": tool["function"] | {"strict": True}}
    for server in (qwen, llama):
        for body in ({"tools": [tool], "tool_choice": "required"}, {"tools": [strict]}):
            response = server.chat(**body)
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert (error["param"], part in error["message"]) == ("tools", True), error
        assert server.chat(tools=[tool], max_tokens=3).status_code == 200  # nothing holds arguments to them


@pytest.fixture(scope="module")
def unparsed(tmp_path_factory):
    """A parrot whose calls and thoughts stay text."""
    flags = {"tool_call_parser": "none", "reasoning_parser": "none"}
    running = start_parrot(tmp_path_factory.mktemp("unparsed"), QWEN, **flags)
    yield running
    running.stop()


def test_without_a_parser_all_is_text(unparsed):
    choice = first(unparsed, THOUGHT + CALL, tools=TOOLS)
    assert (choice.message.content, choice.finish_reason) == (THOUGHT + CALL, "stop")


def test_calls_that_stay_text_cannot_be_required(unparsed):
    strict = {"type": "function", "function": {"name": "f", "strict": True}}
    for body in ({"tools": [WEATHER], "tool_choice": "required"}, {"tools": [strict]}):
        error = unparsed.chat(**body).json()["error"]
        assert (error["param"], "tool_call_parser=none" in error["message"]) == ("tools", True)
    assert unparsed.chat(tools=[WEATHER], max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("names", "texts"),
    [
        (("<tool_call>", "</think>", "<other>"), [b"<tool_call>", b"</think>", b""]),
        (("<|channel|>", "<|start|>", "<|return|>"), [b"<|channel|>", b"<|start|>", b""]),
        (("<|message|>", "<|start|>", "<|return|>"), [b"", b"", b""]),
    ],
)
def test_marks_are_text_where_the_tokenizer_calls_them_special(tmp_path, names, texts):
    directory = make_model(tmp_path / "m", QWEN)
    document = json.loads((directory / "tokenizer.json").read_text())
    for number, name in enumerate(names):
        document["added_tokens"].append(document["added_tokens"][0] | {"id": 2048 + number, "content": name})
    (directory / "tokenizer.json").write_text(json.dumps(document))
    vocabulary = Tokenizer.load(str(directory)).vocabulary
    assert [vocabulary.text_bytes([2048 + number]) for number in range(3)] == texts


@pytest.mark.parametrize(
    ("template", "flags", "calls", "reasoning"),
    [
        (QWEN, {}, HERMES, True),
        ("{{ messages }}{{ tools }}", {}, None, False),
        (LLAMA, {}, LLAMA3, False),
        ("{{ messages }}{{ tools }}<|python_tag|>", {}, LLAMA3, False),
        (QWEN + "{# <function=name> #}", {}, None, True),
        (QWEN + "{# <arg_key>name</arg_key> #}", {}, None, True),
        (LLAMA, {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}, HERMES, True),
        (QWEN, {"tool_call_parser": "llama3", "reasoning_parser": "none"}, LLAMA3, False),
    ],
)
def test_formats_are_those_of_the_template_or_of_the_flags(tmp_path, template, flags, calls, reasoning):
    tokenizer = Tokenizer.load(str(make_model(tmp_path / "m", template)))
    formats = OutputFormats.of(GatewayConfig(**flags), tokenizer)
    assert (formats.calls, formats.reasoning) == (calls, reasoning)
    assert formats.calls_known == (calls is not None)
    assert not formats.channels


@pytest.mark.parametrize("flag", ["auto", "gpt_oss", "none"])
def test_channels_are_read_as_the_template_or_the_flag_has_them(tmp_path, flag):
    tokenizer = Tokenizer.load(str(make_model(tmp_path / "m", QWEN if flag == "gpt_oss" else GPT_OSS)))
    formats = OutputFormats.of(GatewayConfig(reasoning_parser=flag), tokenizer)
    assert formats.channels == formats.has_reasoning == (flag != "none")


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory):
    """A parrot that writes in the channels of gpt-oss."""
    running = start_parrot(tmp_path_factory.mktemp("gpt_oss"), GPT_OSS)
    yield running
    running.stop()


@pytest.mark.parametrize("ask", [first, streamed])
def test_the_analysis_of_gpt_oss_is_reasoning(gpt_oss, ask):
    choice = ask(gpt_oss, CHANNELS)
    assert (choice.message.reasoning_content, choice.message.content) == ("Is it cold?", "It is.")
