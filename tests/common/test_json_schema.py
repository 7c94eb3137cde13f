"""Schemas say what the library overlooks; what the library knows stays as it was said."""

import json

import pytest

from services.common.errors import InvalidRequest
from services.common.text.grammar import Grammars
from services.common.text.grammar_text import choice_terminal, json_rule, regex_rule
from services.common.text.json_schema import tightened
from services.common.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def accepts():
    tokenizer = Tokenizer.load("builtin")
    grammars = Grammars(tokenizer, [0, 1])

    def accepts(rule: str, text: str) -> bool:
        matcher = grammars.matcher(f"start: {rule}")
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    return accepts


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date", ["2024-02-29", "2000-02-29", "0001-12-31", "2023-02-28"], ["2023-02-29", "1900-02-29", "0000-01-01"]),
        ("time", ["23:59:59Z", "00:00:00.5+01:30"], ["23:59:60Z", "12:49:60+23:34"]),
        ("date-time", ["2024-02-29T10:00:00Z"], ["2023-02-29T10:00:00Z", "2024-02-29T10:00:60Z"]),
        ("hostname", ["example.com", ".".join(["a" * 63] * 3)], [".".join(["a" * 63] * 4)]),
    ],
)
def test_formats_are_what_they_are_elsewhere(accepts, form, right, wrong):
    for schema in ({"format": form}, {"type": "string", "format": form, "allOf": [{"minLength": 1}]}):
        rule = json_rule(schema | {"type": "string"})
        for text in right:
            assert accepts(rule, json.dumps(text)), text
        for text in wrong:
            assert not accepts(rule, json.dumps(text)), text


@pytest.mark.parametrize(
    ("bounds", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.5"], ["0", "-0", "0.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.1", "-0.5"], ["0", "-0", "0.0"]),
        ({"exclusiveMinimum": 1, "exclusiveMaximum": 1.5}, ["1.1"], ["1", "1.0", "1.5"]),
        ({"exclusiveMinimum": 1, "minimum": 3}, ["3", "4"], ["2"]),
        ({"exclusiveMinimum": 3, "minimum": 1}, ["4"], ["3"]),
        ({"exclusiveMinimum": 0.5}, ["0.6", "1"], ["0.5"]),
        ({"exclusiveMinimum": 1700000000000}, ["1700000000001"], ["1700000000000"]),
        ({"exclusiveMaximum": -(10**15)}, ["-1000000000000001"], ["-1000000000000000"]),
        ({"type": ["integer", "null"], "exclusiveMinimum": 10**13}, ["10000000000001", "null"], ["10000000000000"]),
    ],
)
def test_an_open_end_is_open(accepts, bounds, right, wrong):
    rule = json_rule({"type": "number"} | bounds)
    for text in right:
        assert accepts(rule, text), text
    for text in wrong:
        assert not accepts(rule, text), text


def test_an_open_end_of_one_part_is_open_for_the_whole(accepts):
    rule = json_rule({"allOf": [{"type": "number", "exclusiveMinimum": 0}, {"maximum": 0.5}]})
    assert accepts(rule, "0.5")
    assert not accepts(rule, "0")


def test_what_only_looks_like_a_keyword_stays():
    same = [
        {"properties": {"format": {"type": "string"}, "exclusiveMinimum": {"const": {"format": "date"}}},
         "additionalProperties": False},
        {"enum": [{"exclusiveMinimum": 0}, {"format": "time"}]},
        {"type": "integer", "exclusiveMinimum": 0},
        {"exclusiveMinimum": True, "exclusiveMaximum": "0", "format": 3},
        {"default": {"exclusiveMaximum": 0}, "items": [True, False]},
        {"exclusiveMinimum": 2**60},
    ]  # fmt: skip
    for schema in same:
        assert tightened(schema) == schema
    inside = tightened({"properties": {"enum": {"exclusiveMinimum": 0}, "const": {"anyOf": [{"format": "hostname"}]}}})
    assert inside["properties"]["enum"].keys() == {"minimum"}
    assert inside["properties"]["const"]["anyOf"][0]["maxLength"] == 253


NEUTRAL = [
    ("null", ["null"], ['"a"'], [
        {"title": "t"}, {"description": "d"}, {"$comment": "c"}, {"examples": [None]}, {"default": None},
        {"default": {"not": {}}}, {"deprecated": True}, {"readOnly": True}, {"writeOnly": True}, {"x-own": {"not": {}}},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"}, {"$id": "https://example.com/it"},
        {"$anchor": "it"}, {"$recursiveAnchor": False}, {"$defs": {}}, {"definitions": {}}, {"allOf": []},
        {"allOf": [{}]}, {"anyOf": [True]}, {"oneOf": [{}]}, {"not": False}, {"if": {"const": 1}},
        {"if": False, "then": True, "else": {}}, {"then": {"type": "string"}},
        {"else": False}, {"then": False, "else": False}]),
    ("array", ["[]", "[1,1]"], ["{}", "1"], [
        {"uniqueItems": False}, {"minItems": 0}, {"items": True}, {"items": {}}, {"items": {"uniqueItems": False}},
        {"prefixItems": []}, {"additionalItems": True}, {"unevaluatedItems": True}, {"unevaluatedItems": {}},
        {"minContains": 2}, {"maxContains": 0}]),
    ("object", ["{}", '{"if":1}'], ["[]"], [
        {"additionalProperties": True}, {"additionalProperties": {}}, {"minProperties": 0}, {"required": []},
        {"unevaluatedProperties": True}, {"unevaluatedProperties": {}}, {"patternProperties": {}},
        {"propertyNames": True}, {"propertyNames": {}}, {"propertyNames": {"type": "string"}},
        {"dependentRequired": {}}, {"dependentSchemas": {}}, {"dependencies": {}}]),
    ("string", ['""', '"a"'], ["1"], [
        {"minLength": 0}, {"pattern": ""}, {"contentMediaType": "text/plain"}, {"contentEncoding": "base64"},
        {"contentSchema": {"not": {}}}]),
    ("number", ["0", "-1.5"], ["null"], [{"format": "double"}, {"multipleOf": 0.5}]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "right", "wrong", "more"),
    [(kind, right, wrong, more) for kind, right, wrong, keywords in NEUTRAL for more in keywords],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_what_restricts_nothing_is_no_reason_to_refuse_a_schema(accepts, kind, right, wrong, more):
    plain = {"type": kind} | more
    inside = {"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"], "$defs": {"p": plain}}
    for schema, frame in ((plain, "%s"), ({"allOf": [plain]}, "%s"), (inside, '{"p":%s}')):
        rule = json_rule(schema)
        assert all(accepts(rule, frame % text) for text in right), schema
        assert not any(accepts(rule, frame % text) for text in wrong), schema


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True}, {"uniqueItems": 0}, {"unevaluatedItems": False}, {"unevaluatedProperties": False},
        {"unevaluatedProperties": {"type": "null"}}, {"propertyNames": {"maxLength": 1}}, {"propertyNames": False},
        {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"required": ["b"]}}},
        {"dependencies": {"a": ["b"]}}, {"dependencies": {"a": {"required": ["b"]}}}, {"not": {}}, {"not": True},
        {"contains": {}, "minContains": 0}, {"contains": {"const": 1}}, {"maxContains": "many"},
        {"if": {"const": 1}, "then": False}, {"if": True, "else": {"const": 1}}, {"if": 3}, {"if": 3, "then": True},
        {"$recursiveAnchor": True}, {"dependentRequired": {"then": ["b"]}}, {"dependencies": {"then": ["b"]}},
        {"dependentSchemas": {"then": {"required": ["b"]}}}, {"propertyNames": {"not": {"uniqueItems": False}}},
        {"items": {"uniqueItems": True}}, {"not": {"uniqueItems": False}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_restricts_and_cannot_be_followed_is_refused(accepts, schema):
    with pytest.raises(InvalidRequest):
        accepts(json_rule(schema), "null")


def test_an_object_stays_open_that_says_so_in_a_word_the_library_lacks(accepts):
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert accepts(json_rule(schema | {"unevaluatedProperties": True}), '{"a":null,"b":1}')
    assert not accepts(json_rule(schema | {"uniqueItems": False}), '{"a":null,"b":1}')


def test_an_object_has_only_what_its_schema_names_unless_it_says_otherwise(accepts):
    names = {"a": {"type": "null"}, "b": {"$ref": "#/$defs/b"}}
    inner = {"$defs": {"b": {"type": "object", "properties": {"c": {"type": "null"}}, "required": ["c"]}}}
    rule = json_rule({"type": "object", "properties": names} | inner)
    assert accepts(rule, '{"a": null, "b": {"c": null}}')
    for text in ('{"a": null, "d": 1}', '{"b": {"c": null, "d": 1}}'):
        assert not accepts(rule, text), text
    for open_end in ({"additionalProperties": True}, {"patternProperties": {"^d": {}}}, {"required": ["d"]}):
        assert accepts(json_rule({"type": "object", "properties": names} | inner | open_end), '{"a": null, "d": 1}')


def test_merged_schemas_stay_open_for_each_other(accepts):
    a, b = {"properties": {"a": {"type": "null"}}}, {"properties": {"b": {"type": "null"}}, "required": ["b"]}
    for schema in ({"allOf": [a, b]}, a | {"anyOf": [b]}, a | {"$defs": {"b": b}, "$ref": "#/$defs/b"}):
        assert accepts(json_rule(schema | {"type": "object"}), '{"a": null, "b": null}'), schema
    assert accepts(json_rule({"type": "object"}), '{"any": ["thing"]}')


def test_blanks_are_bounded_whatever_a_schema_says(accepts):
    for own in ({}, {"x-guidance": {"whitespace_pattern": "[ ]*", "lenient": True}}):
        rule = json_rule({"type": "object", "properties": {"a": {"type": "null"}}} | own)
        assert accepts(rule, '{"a":null}')
        assert accepts(rule, '{"a":' + " " * 32 + "null}")
        assert not accepts(rule, '{"a":' + " " * 33 + "null}")


def test_any_text_can_be_a_choice_and_any_slash_stand_in_a_regular_expression(accepts):
    texts = ["", "a", 'q"', "back\\slash", "line\nbreak", "\x00\x1f\x7f", "naïve ☃ 😀", "<think>", "/", "\u2028"]
    for text in texts:
        assert accepts(f"C\nC: {choice_terminal(texts)}", text), text
    assert not accepts(f"C\nC: {choice_terminal(texts)}", "b")
    for regex, text in (("a/b", "a/b"), ("a\\/b", "a/b"), ("", ""), ("//", "//"), ("x\ny", "x\ny")):
        assert accepts(regex_rule(regex), text), regex
