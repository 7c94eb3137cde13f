"""Writes grammars in llguidance's dialect of Lark."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark

from services.common.text.json_schema import tightened

MAX_GRAMMAR_BYTES = 256 * 1024

# Options for every JSON value. With unlimited whitespace, some models write blanks until their tokens are used up. A
# schema may contain the other options too, so they are set explicitly.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "lenient": False, "coerce_one_of": False}


def json_rule(schema: dict[str, Any]) -> str:
    """Return the right side of a rule that matches JSON that satisfies ``schema``."""
    own = schema.get("x-guidance")  # a schema may set other options of the library
    strict = tightened(schema) | {"x-guidance": (own if isinstance(own, dict) else {}) | JSON_OPTIONS}
    return f"%json {json.dumps(strict, ensure_ascii=False)}"


def regex_rule(regex: str) -> str:
    """Return the right side of a rule that matches ``regex`` as a whole."""
    return f"/{regex_to_lark(regex, '')}/" if regex else '""'


def literal(text: str) -> str:
    """Return the right side of a rule that matches exactly ``text``.

    Only a regular expression can contain control characters.
    """
    if text.isprintable() or not any(character < " " or character == "\x7f" for character in text):
        return json.dumps(text, ensure_ascii=False)
    return "/" + "".join(f"\\x{{{ord(character):x}}}" for character in text) + "/"


def choice_terminal(texts: Sequence[str]) -> str:
    """Return the right side of a terminal that matches one of ``texts``.

    As rules, many texts exceed a parser's limits.
    """
    return " | ".join(map(literal, texts))
