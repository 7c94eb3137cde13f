"""A body's parameters to the grammar that its answer has to match."""

import json
import re
from typing import Any

from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common.errors import InvalidRequest
from services.gateway.job import Grammar
from services.gateway.openai.grammar.body import GrammarBody
from services.gateway.text import TextEngine

_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_ANY_OBJECT = {"type": "object"}


async def wanted_grammar(text: TextEngine, body: GrammarBody) -> Grammar | None:
    """None when the answer may be anything. Raises ``InvalidRequest``."""
    grammar = _asked(body)
    if grammar is not None and grammar.kind == "lark" and _GBNF_RULE.search(grammar.value):
        return await text.in_thread(_from_gbnf, grammar)
    return grammar


def _asked(body: GrammarBody) -> Grammar | None:
    if (form := body.response_format) is not None and form.wanted:
        schema = _ANY_OBJECT if form.json_schema is None else form.json_schema.schema_
        return _of_schema(schema, "response_format")
    if (wanted := body.structured_outputs) is not None:
        schema = _ANY_OBJECT if wanted.json_object else wanted.json_
        return _one_of(schema, wanted.regex, wanted.choice, wanted.grammar, "structured_outputs")
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(body, name) is not None:
            return _one_of(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, name)
    return None


def _one_of(
    schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None, field: str
) -> Grammar:
    if schema is not None:
        return Grammar("json_schema", schema, field) if isinstance(schema, str) else _of_schema(schema, field)
    if regex is not None:
        return Grammar("regex", regex, field)
    if choice is not None:
        return Grammar("choices", tuple(choice), field)
    return Grammar("lark", grammar, field)


def _of_schema(schema: dict[str, Any], field: str) -> Grammar:
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False), field)


def _from_gbnf(grammar: Grammar) -> Grammar:
    try:
        return Grammar("lark", gbnf_to_lark(_ESCAPE.sub(_character, grammar.value)), grammar.field)
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:  # the library raises this very class
        reason = str(error)[:200]
    raise InvalidRequest(
        f"the grammar in GBNF cannot be read: {reason}", field=grammar.field, reason="INVALID_GRAMMAR"
    ) from None


def _character(escape: re.Match[str]) -> str:
    """What an escape by a character's number stands for: the library takes zeros off it, and then reads another."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
