"""What a Messages body means to the model, and bodies of Claude Code."""

import re

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.text.chat_template import ChatTemplate
from services.gateway.anthropic.body import CountTokensBody, MessagesBody
from services.gateway.anthropic.conversation import ModelTraits, shows_late_system
from services.gateway.openai.json_value import write_again
from services.gateway.openai.parse import parse
from services.gateway.openai.schemas import ChatBody
from tests.gateway.deployment import PATIENCE_S
from tests.gateway.messages.test_create import CLOCK, THINKING, WEATHER
from tests.gateway.test_fuzz import values
from tests.properties import examples

USE = {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"file_path": "/tmp/ä.txt"}}
# As Claude Code 2 sends it: query, headers and body.
CLAUDE_CODE_HEADERS = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
}
CLAUDE_CODE = {
    "max_tokens": 32000,
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                {"type": "text", "text": "Read it.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
        },
        {"role": "system", "content": "Available agents:\n- Plan"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I read it.", "signature": "EqQBCgIYAhIM"},
                {"type": "text", "text": "Let me read it."},
                USE,
                USE | {"id": "toolu_2", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "tool_use_id": "toolu_1",
                    "type": "tool_result",
                    "content": [{"type": "text", "text": "1\tone"}, {"type": "text", "text": "2\ttwo"}],
                },
                {
                    "tool_use_id": "toolu_2",
                    "type": "tool_result",
                    "is_error": True,
                    "content": "<tool_use_error>InputValidationError</tool_use_error>",
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Done?"},
            ],
        },
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.0; cch=a1b2c;"},
        {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "tools": [
        {
            "name": "Read",
            "description": "Reads a file.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"file_path": {"description": "Absolute.", "type": "string"}},
                "required": ["file_path"],
                "additionalProperties": False,
            },
            "eager_input_streaming": True,
            "cache_control": {"type": "ephemeral"},
        },
        {"name": "mcp__server__" + "x" * 90, "type": "custom", "input_schema": {"type": "object", "properties": {}}},
    ],
    "metadata": {"user_id": '{"device_id":"' + "f" * 64 + '","account_uuid":"","session_id":"' + "e" * 600 + '"}'},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "stream": True,
}


def chat(variables=("enable_thinking",), late_system=True, **body) -> ChatBody:
    given = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]} | body
    return parse(write_again(given), MessagesBody).chat(ModelTraits(variables, late_system))


def rendered(**body) -> list[dict]:
    return [message.render() for message in chat(**body).messages]


def refused(**body) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    return caught.value


def test_a_body_of_claude_code_is_answered(claude, name):
    answer = httpx.post(
        f"{claude.url}/v1/messages?beta=true",
        json=CLAUDE_CODE | {"model": name},
        headers=CLAUDE_CODE_HEADERS,
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    assert "".join(re.findall('"text_delta","text":"([^"]*)"', answer.text)) == "Done?"
    assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
    assert set(answer.headers["x-toka-ignored-params"].split(",")) <= {"output_config.effort", "thinking.budget_tokens"}
    counted = {key: CLAUDE_CODE[key] for key in ("messages", "system", "tools", "thinking", "context_management")}
    answer = httpx.post(
        f"{claude.url}/v1/messages/count_tokens?beta=true", json=counted | {"model": name}, headers=CLAUDE_CODE_HEADERS
    )
    assert answer.json()["input_tokens"] > 100


def test_what_the_model_reads_of_a_body_of_claude_code():
    call = {"type": "function", "function": {"name": "Read", "arguments": {"file_path": "/tmp/ä.txt"}}}
    assert rendered(**CLAUDE_CODE) == [
        {"role": "system", "content": "You are Claude Code.\nBe brief."},
        {"role": "user", "content": "<system-reminder>\nToday is Monday.\n</system-reminder>\nRead it."},
        {"role": "system", "content": "Available agents:\n- Plan"},
        {
            "role": "assistant",
            "content": "Let me read it.",
            "reasoning_content": "I read it.",
            "tool_calls": [
                {"id": "toolu_1", **call},
                {"id": "toolu_2", "type": "function", "function": {"name": "Read", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "1\tone\n2\ttwo", "tool_call_id": "toolu_1", "name": "Read"},
        {
            "role": "tool",
            "content": "Error: <tool_use_error>InputValidationError</tool_use_error>",
            "tool_call_id": "toolu_2",
            "name": "Read",
        },
        {"role": "user", "content": "Done?"},
    ]
    made = chat(**CLAUDE_CODE)
    assert made.chat_template_kwargs == {"enable_thinking": True}
    assert made.tools[0].function.name == "Read"
    assert made.most_tokens == 32000
    assert made.stream


def test_turns_of_one_role_become_one_message():
    text = {"type": "text", "text": "two"}
    turns = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": [text]},
        {"role": "assistant", "content": "th"},
        {"role": "assistant", "content": [{"type": "text", "text": "ree"}, {"type": "redacted_thinking", "data": "x"}]},
        {"role": "system", "content": "four"},
        {"role": "user", "content": "five"},
    ]
    assert [(each["role"], each["content"]) for each in rendered(messages=turns)] == [
        ("user", "one\ntwo"),
        ("assistant", "three"),
        ("system", "four"),
        ("user", "five"),
    ]


def test_a_system_turn_that_the_template_would_refuse_becomes_text_of_the_user():
    turns = [
        {"role": "system", "content": "zero"},
        {"role": "user", "content": "one"},
        {"role": "system", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three"},
    ]
    assert [(each["role"], each["content"]) for each in rendered(messages=turns, system="S", late_system=False)] == [
        ("system", "S\nzero"),
        ("user", "one\n<system-reminder>\ntwo\n</system-reminder>"),
        ("assistant", "three"),
    ]


@pytest.mark.parametrize(
    ("source", "late_system"),
    [
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", True),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", False),
        (
            "{% if messages[1:] | selectattr('role', 'eq', 'system') | list %}{{ raise_exception('no') }}{% endif %}",
            False,
        ),
    ],
)
def test_whether_a_template_shows_late_system_turns_is_found_out(source, late_system):
    assert shows_late_system(ChatTemplate(source, {})) is late_system


@pytest.mark.parametrize(
    ("thinking", "variables", "told"),
    [
        (THINKING, ("enable_thinking",), {"enable_thinking": True}),
        ({"type": "adaptive"}, ("enable_thinking",), {"enable_thinking": True}),
        ({"type": "disabled"}, ("enable_thinking",), {"enable_thinking": False}),
        (None, ("enable_thinking",), {"enable_thinking": False}),
        (THINKING, (), {}),
        (THINKING, ("reasoning_effort",), {"reasoning_effort": "high"}),
    ],
)
def test_what_the_template_is_told_of_thinking(thinking, variables, told):
    made = chat(variables, thinking=thinking, output_config={"effort": "high"})
    assert made.chat_template_kwargs == told


def test_the_choice_of_a_tool():
    def choice(**given):
        made = chat(tools=[WEATHER, CLOCK], tool_choice=given)
        return made.tool_choice, made.parallel_tool_calls

    assert choice(type="auto") == ("auto", True)
    assert choice(type="none") == ("none", True)
    assert choice(type="any", disable_parallel_tool_use=True) == ("required", False)
    named, parallel = choice(type="tool", name="clock", disable_parallel_tool_use=False)
    assert (named.function.name, parallel) == ("clock", True)


DOCUMENT = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "a"}


@pytest.mark.parametrize(
    ("given", "traits", "names"),
    [
        ({"thinking": THINKING}, ModelTraits({"enable_thinking"}, True, True, True), []),
        ({"thinking": THINKING}, ModelTraits({"enable_thinking"}, True, True, False), ["thinking.budget_tokens"]),
        ({"thinking": THINKING}, ModelTraits(()), ["thinking"]),
        ({"thinking": {"type": "disabled"}}, ModelTraits(()), []),
        ({"thinking": {"type": "disabled"}}, ModelTraits((), reasoning=True), ["thinking"]),
        ({"output_config": {"effort": "low"}}, ModelTraits(()), ["output_config.effort"]),
        ({"output_config": {"effort": "low"}}, ModelTraits({"reasoning_effort"}), []),
    ],
)
def test_what_a_model_has_no_use_for_is_named(given, traits, names):
    body = parse(write_again({"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]} | given), MessagesBody)
    assert body.unhonoured(traits) == names


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0="}}


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"messages": [{"role": "user", "content": [PNG]}]}, "messages[0].content[0]", "'image'"),
        (
            {"messages": [{"role": "user", "content": [DOCUMENT]}]},
            "messages[0].content[0]",
            "'document'",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [PNG]}]}
                ]
            },
            "messages[0].content[0].content[0]",
            "'image'",
        ),
        ({"system": [PNG]}, "system[0]", "'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "web_search_20250305"),
        ({"tools": [WEATHER | {"input_examples": [{"city": "Rome"}]}]}, "tools[0].input_examples", "description"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "'weather'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "'name'"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "'adaptive'"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits", "shorten"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management.edits",
            "keep='all'",
        ),
        ({"thread": {"type": "create"}}, "thread", "whole conversation"),
        ({"container": "c"}, "container", "leave it out"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "leave it out"),
        ({"speed": "fast"}, "speed", "'standard'"),
        ({"response_format": {"type": "json_object"}}, "response_format", "output_config.format"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "max_tokens"),
        ({"grammar": "root ::= x"}, "grammar", "output_config.format"),
        ({"num_predict": 3}, "num_predict", "max_tokens"),
        ({"repeat_penalty": 1.2}, "repeat_penalty", "repetition_penalty"),
        ({"stop": "a", "stop_sequences": ["b"]}, "stop", "stop_sequences"),
        ({"max_tokens": None}, "max_tokens", "'max_tokens'"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user", "content": []}]}, "messages", "add text"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "messages[0].content[0]", "'tool_use'"),
        (
            {"messages": [{"role": "assistant", "content": [RESULT]}]},
            "messages[0].content[0]",
            "'tool_result'",
        ),
        ({"messages": [{"role": "assistant", "content": [USE]}]}, "messages", "tool_result"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages", "no text"),
        ({"messages": [{"role": "system", "content": [USE]}]}, "messages[0].content[0]", "'tool_use'"),
    ],
)
def test_what_is_refused_is_named(body, field, words):
    error = refused(**body)
    assert error.field == field
    assert words in error.message


def test_neutral_values_pass():
    body = {"container": None, "mcp_servers": [], "speed": "standard", "service_tier": "auto", "diagnostics": None}
    tool = WEATHER | {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}
    assert chat(**body, tools=[tool], cache_control={"type": "ephemeral"}, n=1).samples == 1


texts = st.text(max_size=5)
blocks = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("thinking"), "thinking": texts}),
    st.fixed_dictionaries({"type": st.just("tool_use"), "id": texts, "name": texts, "input": st.just({"a": 1})}),
    st.fixed_dictionaries({"type": st.just("tool_result"), "tool_use_id": texts}, optional={"content": texts | values}),
    values,
)
turns = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": texts | st.lists(blocks, max_size=4) | values,
    }
)
bodies = st.fixed_dictionaries(
    {"messages": st.lists(turns, max_size=4) | values},
    optional={name: values for name in MessagesBody.model_fields if name not in ("messages", "model")}
    | {"tools": st.just([WEATHER]) | values, "stream": st.booleans(), "thinking": st.just(THINKING) | values},
)


@settings(max_examples=examples(150), deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(body=bodies)
def test_random_bodies_never_break_the_server(claude, body):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        response = claude.post(path, {"max_tokens": 3} | body)
        assert response.status_code < 500, (body, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"]
        assert '"type":"error"' not in response.text or response.status_code >= 400, (body, response.text)


def test_every_parameter_of_count_tokens_is_one_of_messages():
    assert set(CountTokensBody.model_fields) <= set(MessagesBody.model_fields)
