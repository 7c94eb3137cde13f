"""A body's parameters to the grammar that its answer has to match."""

import json
import re
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common.errors import InvalidRequest
from services.gateway.engine.request import Grammar, GrammarKind
from services.gateway.engine.text import INLINE_BYTES, TextEngine
from services.gateway.openai.grammar.body import GrammarBody
from services.gateway.openai.json_value import json_size

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # of one line: it takes as long as that is
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_ANY_OBJECT = {"type": "object"}


async def wanted_grammar(text: TextEngine, body: GrammarBody) -> Grammar | None:
    """None when the answer may be anything. Raises ``InvalidRequest``."""
    asked = _asked(body)
    if asked is None:
        return None
    if _is_gbnf(asked):
        return await text.in_thread(_make, asked)
    return await text.worked(json_size(asked.value, INLINE_BYTES), _make, asked)


class _Asked(NamedTuple):
    """As the body has it."""

    kind: GrammarKind
    value: dict[str, Any] | list[str] | str  # a dict: the schema; a list: the choices
    field: str


def _asked(body: GrammarBody) -> _Asked | None:
    if (form := body.response_format) is not None and form.wanted:
        return _one_of(form.schema_of_answer, form.regex, None, None, "response_format")
    if (wanted := body.structured_outputs) is not None:
        given = _ANY_OBJECT if wanted.json_object else wanted.json_
        return _one_of(given, wanted.regex, wanted.choice, wanted.grammar, "structured_outputs")
    for name in ("guided_json", "guided_regex", "guided_choice", "guided_grammar"):
        if getattr(body, name) is not None:
            given = body.name_given(name)
            return _one_of(body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar, given)
    return None


def _one_of(
    schema: dict[str, Any] | str | None, regex: str | None, choice: list[str] | None, grammar: str | None, field: str
) -> _Asked:
    given: tuple[tuple[GrammarKind, dict[str, Any] | list[str] | str | None], ...] = (
        ("json_schema", schema),
        ("regex", regex),
        ("choices", choice),
        ("lark", grammar),
    )
    return next(_Asked(kind, value, field) for kind, value in given if value is not None)


def _is_gbnf(asked: _Asked) -> bool:
    return asked.kind == "lark" and _GBNF_RULE.search(str(asked.value)) is not None


def _make(asked: _Asked) -> Grammar:
    """Raises ``InvalidRequest``."""
    if _is_gbnf(asked):
        return _from_gbnf(asked)
    value = asked.value
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    return Grammar(asked.kind, tuple(value) if isinstance(value, list) else value, asked.field)


def _from_gbnf(grammar: _Asked) -> Grammar:
    try:
        return Grammar("lark", gbnf_to_lark(_ESCAPE.sub(_character, str(grammar.value))), grammar.field)
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
