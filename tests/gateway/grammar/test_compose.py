"""Which answers a composed grammar lets through: looked at with the library that follows it."""

import json

import pytest

from services.common.errors import InvalidRequest
from services.common.text.grammar import Grammars
from services.gateway.engine.request import Grammar
from services.gateway.openai.grammar.answer import Thoughts, compose
from services.gateway.openai.grammar.calls import CallRules
from services.gateway.openai.messages import Tool
from services.gateway.openai.output.calls import HERMES, LLAMA3

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "near": {"$ref": "#/$defs/place"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["sea", "$ref"]}},
}
ANSWER = Grammar("json_schema", '{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}', "it")


@pytest.fixture(scope="module")
def accepts(tokenizer):
    grammars = Grammars(tokenizer, [0, 1])

    def accepts(grammar: Grammar, text: str) -> bool:
        matcher = grammars.matcher(grammar.value)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


def tool(name: str, parameters: dict | None = None, *, strict: bool | None = None) -> Tool:
    return Tool(type="function", function={"name": name, "parameters": parameters, "strict": strict})


def rules(form, *tools: Tool, parallel: bool = True, strict_only: bool = False) -> CallRules:
    return CallRules(form, tools, parallel=parallel, strict_only=strict_only)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def llama(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


FORMS = [(HERMES, hermes, "\n"), (LLAMA3, llama, "; ")]


def test_what_needs_no_rules_of_the_gateway_stays_as_it_was_said():
    assert compose(None, None, must_call=False, thoughts=Thoughts.OPENED) is None
    assert compose(ANSWER, None, must_call=False, thoughts=Thoughts.NONE) is ANSWER


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (ANSWER, '{"n": 3}', '{"m": 3}'),
        (Grammar("json_schema", "true", "it"), "[1, 2]", "[1, 2"),
        (Grammar("regex", "a/b|c+", "it"), "a/b", "ab"),
        (Grammar("choices", ("yes", 'n"o\n'), "it"), 'n"o\n', "maybe"),
        (Grammar("lark", '%ignore / /\nstart: "x" thought\nthought: "y"', "it"), "x y", "xz"),
    ],
)
def test_a_grammar_begins_behind_the_thoughts(accepts, wanted, right, wrong):
    opened = compose(wanted, None, must_call=False, thoughts=Thoughts.OPENED)
    assert opened.field == "it"
    for text in (f"hm\n{wrong}</think>{right}", f"</think>\n\n{right}"):
        assert accepts(opened, text)
    for text in (right, f"hm</think>{wrong}", "hm", "hm</think>", f"hm</think>no</think>{right}"):
        assert not accepts(opened, text)
    maybe = compose(wanted, None, must_call=False, thoughts=Thoughts.MAYBE)
    for text in (right, f"<think>hm</think>{right}", f"\n<think>\n{wrong}\n</think>\n\n{right}"):
        assert accepts(maybe, text)
    for text in (wrong, f"hm</think>{right}", f"<think>hm</think>{wrong}", f"\u2028<think>hm</think>{right}"):
        assert not accepts(maybe, text)


@pytest.mark.parametrize(("form", "call", "between"), FORMS)
def test_a_call_that_must_be_is_one_of_a_tool_with_arguments_of_its_schema(accepts, form, call, between):
    grammar = compose(None, rules(form, tool("weather", WEATHER), tool("now")), must_call=True, thoughts=Thoughts.NONE)
    assert grammar.field == "tools"
    right = call("weather", '{"city": "Ulm", "near": "$ref"}')
    for text in (right, call("now", "{}"), between.join([right, call("now", "{}"), right])):
        assert accepts(grammar, text), text
    for text in ("", "hello", call("weather", "{}"), call("weather", '{"city": "Ulm", "near": "lake"}'),
                 call("now", '{"city": "Ulm"}'), call("later", "{}"), right + " and so on"):  # fmt: skip
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(("form", "call", "between"), FORMS)
def test_without_parallel_calls_there_is_one(accepts, form, call, between):
    calls = rules(form, tool("now"), parallel=False)
    grammar = compose(None, calls, must_call=True, thoughts=Thoughts.NONE)
    assert accepts(grammar, call("now", "{}"))
    assert not accepts(grammar, between.join([call("now", "{}")] * 2))


@pytest.mark.parametrize(("form", "call", "between"), FORMS)
def test_any_text_may_stand_around_strict_calls_but_no_call_that_breaks_its_schema(accepts, form, call, between):
    calls = rules(form, tool("weather", WEATHER, strict=True), tool("now", WEATHER), strict_only=True)
    grammar = compose(None, calls, must_call=False, thoughts=Thoughts.NONE)
    right = call("weather", '{"city": "Ulm"}')
    for text in ("", "Hello <tool", 'an object: {"name": "Bob", "x": {}}', right, f"Well,\n{right}", f"{right} so",
                 between.join([right, call("now", '{"any": [1]}')])):  # fmt: skip
        assert accepts(grammar, text), text
    for text in (call("weather", "{}"), f"Well, {call('weather', '{}')}", call("now", "[]"),
                 f"{right} then {call('weather', '[]')}"):  # fmt: skip
        assert not accepts(grammar, text), text


def test_llama_calls_in_other_words_are_held_to_their_schema_or_are_none(accepts):
    calls = rules(LLAMA3, tool("weather", WEATHER, strict=True), strict_only=True)
    grammar = compose(None, calls, must_call=False, thoughts=Thoughts.NONE)
    assert accepts(grammar, '{"type": "function", "name": "weather", "parameters": {"city": "Ulm"}}')
    for text in ('{"parameters": {}, "name": "weather"}', '{"name":\n"weather"}'):
        assert not accepts(grammar, text), text


def test_thoughts_may_speak_of_calls(accepts):
    calls = rules(HERMES, tool("now", strict=True), strict_only=True)
    grammar = compose(None, calls, must_call=False, thoughts=Thoughts.MAYBE)
    right = hermes("now", "{}")
    for text in ("Hi", right, f"<think>not <tool_call>x</think>\n{right}", "<think>hm</think>Hi", "<thin air>"):
        assert accepts(grammar, text), text
    for text in ("<think>hm", "<tool_call>x", "<think>hm</think><tool_call>x"):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(("form", "call", "between"), FORMS)
def test_an_answer_with_a_format_is_in_it_or_made_of_calls(accepts, form, call, between):
    calls = rules(form, tool("now"), tool("weather", WEATHER), strict_only=True)
    grammar = compose(ANSWER, calls, must_call=False, thoughts=Thoughts.NONE)
    assert grammar.field == "it"
    for text in ('{"n":3}', '{"n": 3}', call("now", '{"a": 1}'), between.join([call("weather", "{}")] * 2)):
        assert accepts(grammar, text), text
    for text in ("", "Hello", '{"m":3}', '{"n":"x"}'):
        assert not accepts(grammar, text), text


def test_references_into_a_schema_are_found_wherever_it_stands(accepts):
    tree = {
        "type": "object",
        "properties": {"next": {"anyOf": [{"$ref": "#"}, {"const": {"$ref": "#/x"}}]}, "as": {"$ref": "#leaf"}},
        "$defs": {"leaf": {"$anchor": "leaf", "enum": [1, 2]}},
        "additionalProperties": False,
    }
    for schema in (tree, tree | {"$id": "http://example.com/tree"}):
        grammar = compose(None, rules(LLAMA3, tool("grow", schema)), must_call=True, thoughts=Thoughts.NONE)
        assert accepts(grammar, llama("grow", '{"next": {"next": {"$ref": "#/x"}, "as": 2}}'))
        assert not accepts(grammar, llama("grow", '{"next": {"as": 3}}'))


def test_parameters_that_are_no_object_and_schemas_that_are_no_json_are_refused():
    with pytest.raises(InvalidRequest, match="'now' are not of type 'object'"):
        compose(None, rules(HERMES, tool("now", {"type": "array"})), must_call=True, thoughts=Thoughts.NONE)
    for text in ("{", "3", json.dumps([1])):
        with pytest.raises(InvalidRequest, match="the schema"):
            compose(Grammar("json_schema", text, "it"), None, must_call=False, thoughts=Thoughts.MAYBE)
