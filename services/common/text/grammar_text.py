"""Grammars as text in llguidance's dialect of Lark: what a gateway puts together and a scheduler is told by kind."""

import json
from collections.abc import Sequence
from typing import Any

from llguidance import regex_to_lark

from services.common.text.json_schema import tightened

MAX_GRAMMAR_BYTES = 256 * 1024

# Of every JSON value. A model that likes blanks would else write them until its tokens are used up. The others are said
# because a schema can say them, too: nothing in it is passed over.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,32}", "lenient": False, "coerce_one_of": False}


def json_rule(schema: dict[str, Any]) -> str:
    """The right side of a rule: JSON that satisfies ``schema``."""
    own = schema.get("x-guidance")  # other options of the library's it may set itself
    told = tightened(schema) | {"x-guidance": (own if isinstance(own, dict) else {}) | JSON_OPTIONS}
    return f"%json {json.dumps(told, ensure_ascii=False)}"


def regex_rule(regex: str) -> str:
    """The right side of a rule: text that matches ``regex`` as a whole."""
    return f"/{regex_to_lark(regex, '')}/" if regex else '""'


def literal(text: str) -> str:
    """The right side of a rule: exactly ``text``. Control characters can be said in regular expressions only."""
    if text.isprintable() or not any(character < " " or character == "\x7f" for character in text):
        return json.dumps(text, ensure_ascii=False)
    return "/" + "".join(f"\\x{{{ord(character):x}}}" for character in text) + "/"


def choice_terminal(texts: Sequence[str]) -> str:
    """The right side of a terminal: one of ``texts``. As rules many of them were more than a parser's state holds."""
    return " | ".join(map(literal, texts))
