"""Reads the grammar that a body sets for its answer."""

import json
import re
from typing import Any, NamedTuple

from llguidance.gbnf_to_lark import gbnf_to_lark

from services.common.errors import InvalidGrammar
from services.gateway.engine.request import Grammar, GrammarKind
from services.gateway.engine.text import INLINE_BYTES, TextEngine
from services.gateway.openai.grammar.body import GrammarBody
from services.gateway.openai.json_value import json_size

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)  # within a line, so that its time is linear
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_ANY_OBJECT = {"type": "object"}
_KINDS: dict[str, GrammarKind] = {"json": "json_schema", "regex": "regex", "choice": "choices", "grammar": "lark"}


async def wanted_grammar(text: TextEngine, body: GrammarBody) -> Grammar | None:
    """Return the grammar of the answer's text, or None if any text is allowed. Raises ``InvalidRequest``."""
    given = _read(body)
    if given is None:
        return None
    if _is_gbnf(given):
        return await text.in_thread(_from_gbnf, given)
    return await text.worked(json_size(given.value, INLINE_BYTES), _make, given)


class _Given(NamedTuple):
    """A grammar in the form that the body has."""

    kind: GrammarKind
    value: dict[str, Any] | list[str] | str  # a schema, choices, or the text of a schema, a regex or a grammar
    field: str


def _read(body: GrammarBody) -> _Given | None:
    if (form := body.response_format) is not None and form.wanted:
        if form.regex is not None:
            return _Given("regex", form.regex, "response_format")
        return _Given("json_schema", form.schema_of_answer, "response_format")
    if (outputs := body.structured_outputs) is not None:
        if outputs.json_object:
            return _Given("json_schema", _ANY_OBJECT, "structured_outputs")
        given = {"json": outputs.json_, "regex": outputs.regex, "choice": outputs.choice, "grammar": outputs.grammar}
        return next(
            _Given(_KINDS[name], value, "structured_outputs") for name, value in given.items() if value is not None
        )
    for name, kind in _KINDS.items():
        if (value := getattr(body, f"guided_{name}")) is not None:
            return _Given(kind, value, body.name_given(f"guided_{name}"))
    return None


def _is_gbnf(given: _Given) -> bool:
    return given.kind == "lark" and _GBNF_RULE.search(str(given.value)) is not None


def _make(given: _Given) -> Grammar:
    value = given.value
    if isinstance(value, dict):
        value = json.dumps(value, ensure_ascii=False)
    return Grammar(given.kind, tuple(value) if isinstance(value, list) else value, given.field)


def _from_gbnf(grammar: _Given) -> Grammar:
    """Return the grammar in Lark. Raises ``InvalidRequest``."""
    try:
        return Grammar("lark", gbnf_to_lark(_ESCAPE.sub(_character, str(grammar.value))), grammar.field)
    except RecursionError:
        reason = "it is nested too deeply"
    except Exception as error:  # the library raises Exception itself
        reason = str(error)[:200]
    raise InvalidGrammar(f"the grammar in GBNF cannot be read: {reason}", field=grammar.field) from None


def _character(escape: re.Match[str]) -> str:
    """Return the character of a numeric escape, because the library misreads escapes with leading zeros."""
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    number = int(digits, 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)
