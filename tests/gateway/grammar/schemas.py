"""Three hundred JSON Schemas of growing nastiness: some written by hand, the others drawn with a fixed seed."""

import random
from typing import Any

Schema = dict[str, Any]

_FORMATS = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_NAMES = {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 4}


def _object(properties: Schema, *required: str, **more: Any) -> Schema:
    given = {"type": "object", "properties": properties, "required": list(required or properties)}
    return given | {"additionalProperties": False} | more


def _nested(depth: int, inner: Schema) -> Schema:
    for level in range(depth):
        inner = _object({f"level{level}": inner}) if level % 2 else {"type": "array", "items": inner, "maxItems": 1}
    return inner


def by_hand() -> list[Schema]:
    """Those that a server should take, or refuse for what it does not support of them."""
    return [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer"},
        {"type": "number"},
        {"type": "string", "maxLength": 20},
        {"type": "string", "minLength": 3, "maxLength": 3},
        {"type": "string", "minLength": 0, "maxLength": 0},
        {"type": ["string", "null", "integer"], "maxLength": 3},
        {"type": ["integer", "null"], "minimum": 3, "maximum": 9},
        *({"type": "string", "format": name} for name in _FORMATS),
        *(_object({"when": {"type": "string", "format": name}}) for name in _FORMATS),
        {"type": "string", "pattern": "^[a-f0-9]{8}$"},
        {"type": "string", "pattern": "^(foo|bar)+$", "maxLength": 9},
        {"type": "string", "pattern": "^\\d{3}-\\d{4}$"},
        {"type": "string", "pattern": "^[A-Z][a-z]{2,5} [A-Z]\\.$"},
        {"type": "string", "pattern": "b", "maxLength": 5},
        {"type": "string", "pattern": "^[^\\n\"\\\\]{1,5}$"},
        {"type": "string", "pattern": "^[À-Ý][à-ý]{1,3}$"},
        {"type": "string", "pattern": "^(a|b){2}(c|d)?$", "minLength": 3},
        {"type": "integer", "minimum": -3, "maximum": 3},
        {"type": "integer", "exclusiveMinimum": 10, "exclusiveMaximum": 12},
        {"type": "integer", "minimum": 999_999_999_999, "maximum": 1_000_000_000_003},
        {"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 100},
        {"type": "number", "minimum": 0.1, "maximum": 0.25},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        {"type": "number", "minimum": -1.5, "exclusiveMaximum": -0.5},
        {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 10},
        {"type": "number", "minimum": 1e3, "maximum": 1e4},
        {"enum": ["red", "green", "blue"]},
        {"enum": [1, "1", None, True, 1.5, [1], {"a": 1}]},
        {"enum": [f"value number {number}" for number in range(3000)]},
        {"enum": [""]},
        {"enum": ["ü", "☃", "😀", "\u0000", '"', "\\", "\n"]},
        {"const": {"deep": [{"er": [None, {"and": "so on"}]}]}},
        {"const": 0},
        {"type": "string", "enum": ["a", "b", 3]},
        {"type": "string", "enum": ["short", "much longer"], "maxLength": 6},
        _NAMES,
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 5, "maxItems": 5},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
        {"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "maxItems": 4},
        {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 3},
        {"type": "array", "maxItems": 0},
        {"type": "array", "items": False},
        {"type": "object", "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "boolean"}},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1, "maxProperties": 2},
        {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "additionalProperties": False},
        {"type": "object", "required": ["x", "y"], "additionalProperties": {"type": "integer"}},
        _object({"a": {"type": "integer"}}, additionalProperties={"type": "null"}),
        _object({"first name": _NAMES, "ünï☃😀": {"type": "boolean"}, 'q"\\\n': {"type": "null"}, "": {"const": 1}}),
        _object({"$ref": {"type": "integer"}, "type": {"const": "x"}, "properties": {"type": "null"}}),
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"^x_": {"type": "integer"}, "^y_": {"type": "boolean"}},
         "additionalProperties": False, "maxProperties": 3},
        {"type": "object", "properties": {"x_a": {"const": 5}}, "patternProperties": {"^x_": {"type": "integer"}},
         "additionalProperties": False, "required": ["x_a"]},
        _TREE,
        {"$defs": {"list": _object({"head": {"type": "integer"}, "tail": {"$ref": "#/$defs/list"}}, "head")},
         "$ref": "#/$defs/list"},
        {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
        {"definitions": {"a": {"$ref": "#/definitions/b"}, "b": {"type": "boolean"}}, "$ref": "#/definitions/a"},
        {"$defs": {"a/b~c d%": {"type": "boolean"}}, "$ref": "#/$defs/a~1b~0c%20d%25"},
        {"$defs": {"x": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"},
        {"$id": "http://example.com/root", "$defs": {"x": {"$id": "leaf", "type": "integer"}}, "$ref": "leaf"},
        {"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": {"type": "integer", "maximum": 9}}},
        {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
        {"anyOf": [_object({"a": {"type": "integer"}}), _object({"a": {"type": "boolean"}, "b": {"type": "null"}})]},
        {"anyOf": [{"const": "a"}, {"const": "ab"}, {"const": "abc"}]},
        {"oneOf": [{"type": "integer"}, {"type": "null"}]},
        {"oneOf": [_object({"kind": {"const": "cat"}, "lives": {"type": "integer"}}),
                   _object({"kind": {"const": "dog"}, "name": {"type": "string", "maxLength": 5}})]},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        {"allOf": [{"type": "string", "maxLength": 5}, {"minLength": 2}, {"pattern": "^[ab]+$"}]},
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}], "type": "object"},
        {"allOf": [{"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"anyOf": [{"type": "null"}, {"const": 7}]}]},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": 1}}}, {"properties": {f"b{i}": {"const": 2}}}]}
                   for i in range(5)], "type": "object"},
        _nested(12, {"type": "boolean"}),
        _nested(40, {"type": "null"}),
        _object({f"field{number}": {"type": "boolean"} for number in range(30)}),
        {"type": "object", "properties": {f"p{number}": {"type": "null"} for number in range(60)},
         "additionalProperties": False},
        {"title": "Noted", "description": "x", "default": 3, "examples": [4], "deprecated": True, "type": "integer",
         "readOnly": True, "$comment": "none", "contentMediaType": "text/plain"},
        {"type": "object", "properties": {"ratio": {"type": "number", "minimum": 0, "maximum": 1}, "tags": _NAMES,
         "meta": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 3}, "maxProperties": 2}},
         "required": ["ratio", "tags", "meta"], "additionalProperties": False},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array",
         "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False, "minItems": 2},
        {"$schema": "http://json-schema.org/draft-04/schema#", "type": "integer", "minimum": 3,
         "exclusiveMinimum": True, "maximum": 5},
        {"$schema": "https://json-schema.org/draft/2019-09/schema", "type": "array", "items": {"type": "null"},
         "maxItems": 2},
        {"type": "object", "properties": {"a": {"type": "integer"}}, "minProperties": 1, "additionalProperties": False},
        {"type": "object", "properties": {"a": True, "b": False}, "required": ["a"], "additionalProperties": False},
        {"type": "string", "contentEncoding": "base64", "maxLength": 4},
    ]  # fmt: skip


def refused() -> list[Schema]:
    """Those that no answer satisfies, that are none, or that say what is not supported."""
    patterns = {f"^a{{0,{number}}}(x|y)*{number}$": {} for number in range(400)}
    return [
        {"type": "strin"},
        {"type": 3},
        {"type": []},
        {"type": "string", "format": "iri"},
        {"type": "string", "format": "phone"},
        {"type": "string", "pattern": "("},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": "^(a)\\1$"},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "minLength": -1},
        {"type": "string", "enum": [1, 2]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "integer", "minimum": "5"},
        {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
        {"type": "number", "multipleOf": 0},
        {"enum": []},
        {"enum": "a"},
        {"not": {"type": "string"}},
        {"if": {"type": "string"}, "then": {"maxLength": 1}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "integer"}},
        {"type": "array", "items": {"type": "nope"}, "minItems": 1},
        {"type": "array", "minItems": 3, "maxItems": 2},
        {"type": "array", "items": False, "minItems": 1},
        {"type": "object", "properties": []},
        {"type": "object", "required": "a"},
        {"type": "object", "propertyNames": {"maxLength": 3}},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "object", "minProperties": 2, "properties": {"a": {}, "b": {}}, "additionalProperties": False},
        {"type": "object", "patternProperties": {"(": {}}},
        {"type": "object", "patternProperties": patterns},
        {"$ref": "#/$defs/missing"},
        {"$ref": "#"},
        {"$ref": "http://example.com/other.json"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": 3},
        {"$dynamicRef": "#x"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"anyOf": []},
        {"anyOf": {}},
        {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                   {"properties": {"b": {"type": "boolean"}}, "required": ["b"]}], "type": "object",
         "additionalProperties": {"type": "null"}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"oneOf": [{"type": "string"}, {"maxLength": 3}]},
        {"allOf": [{"anyOf": [{"properties": {f"a{i}": {"const": 1}}}, {"properties": {f"b{i}": {"const": 2}}}]}
                   for i in range(24)], "type": "object"},
        {"x-guidance": {"nonsense": True}, "type": "string"},
        {"not": {}, "x-guidance": {"lenient": True}},
        {"type": "object", "properties": {"a": _tower(200)}},
        {"enum": ["x" * 300_000]},
    ]  # fmt: skip


def _tower(height: int) -> Schema:
    schema: Schema = {"type": "null"}
    for _ in range(height):
        schema = {"type": "array", "items": schema}
    return schema


def drawn(count: int, seed: int = 20) -> list[Schema]:
    """Random ones, deeper with their number."""
    dice = random.Random(seed)
    return [_draw(dice, 1 + 3 * number // count) for number in range(count)]


def _draw(dice: random.Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _choice]
    return dice.choice(kinds if depth == 0 else [_array, _mapping, _record, _record, _union, _both, *kinds])(
        dice, depth
    )


def _string(dice: random.Random, depth: int) -> Schema:
    least = dice.randrange(3)
    bounds = {"minLength": least, "maxLength": least + dice.randrange(8)}
    own = [bounds, {"format": dice.choice(_FORMATS)}, {"pattern": dice.choice(["^[ab]{1,4}$", "^x", "\\d$"])} | bounds]
    return {"type": "string"} | dice.choice(own)


def _integer(dice: random.Random, depth: int) -> Schema:
    least = dice.choice([-1000, -7, 0, 1, 10**6])
    return {
        "type": "integer",
        "minimum": least,
        dice.choice(["maximum", "exclusiveMaximum"]): least + dice.choice([2, 40]),
    }


def _number(dice: random.Random, depth: int) -> Schema:
    least = dice.choice([-2.5, 0, 0.125, 99.9])
    return {
        "type": "number",
        dice.choice(["minimum", "exclusiveMinimum"]): least,
        "maximum": least + dice.choice([1, 0.5]),
    }


def _choice(dice: random.Random, depth: int) -> Schema:
    values = [None, True, 0, -1.5, "", "é", "two words", [1, 2], {"k": []}]
    return dice.choice([{"type": "boolean"}, {"type": "null"}, {"enum": dice.sample(values, 4)}, {"const": values[6]}])


def _array(dice: random.Random, depth: int) -> Schema:
    least = dice.randrange(3)
    schema = {
        "type": "array",
        "items": _draw(dice, depth - 1),
        "minItems": least,
        "maxItems": least + dice.randrange(3),
    }
    if dice.random() < 0.3:
        schema["prefixItems"] = [_draw(dice, depth - 1) for _ in range(least)]
    return schema if schema.get("prefixItems") != [] else schema | {"prefixItems": [{}]}


def _mapping(dice: random.Random, depth: int) -> Schema:
    return {"type": "object", "additionalProperties": _draw(dice, depth - 1), "maxProperties": dice.randrange(1, 3)}


def _record(dice: random.Random, depth: int) -> Schema:
    names = dice.sample(["id", "name", "naïve key", "a.b", "x" * 20, "0", "list"], dice.randrange(1, 5))
    schema = _object({name: _draw(dice, depth - 1) for name in names}, *names[: dice.randrange(1, len(names) + 1)])
    if dice.random() < 0.2:
        schema["additionalProperties"] = {"type": "boolean"}
    return schema


def _union(dice: random.Random, depth: int) -> Schema:
    return {"anyOf": [_draw(dice, depth - 1) for _ in range(dice.randrange(2, 4))]}


def _both(dice: random.Random, depth: int) -> Schema:
    base = _object({"tag": {"enum": ["a", "b"]}, "value": _draw(dice, depth - 1)})
    return {"allOf": [base, {"properties": {"tag": {"const": "a"}}}]}
