"""The grammar of a whole answer: reasoning, and then the wanted text, tool calls, or both."""

import json
import re
from enum import Enum
from typing import Any

from services.common.errors import InvalidGrammar, InvalidRequest
from services.common.text.grammar_text import MAX_GRAMMAR_BYTES, choice_terminal, json_rule, regex_rule
from services.common.text.json_schema import read_schema
from services.gateway.engine.request import Grammar
from services.gateway.openai.grammar.calls import CallRules
from services.gateway.openai.json_value import json_size

GRAMMAR_FIELD = "sampling.grammar"  # name of the field in the scheduler's contract
_POSITION = re.compile(r"at \d+\(\d+\): ")


class Thoughts(Enum):
    """The reasoning at the beginning of an answer."""

    NONE = "none"  # the model does not reason, or its reasoning is over
    MAYBE = "maybe"  # the model may open a reasoning section
    OPENED = "opened"  # the prompt has opened the reasoning section


def compose(wanted: Grammar | None, calls: CallRules | None, *, must_call: bool, thoughts: Thoughts) -> Grammar | None:
    """Return the grammar of the whole answer, or None if any answer is allowed.

    ``wanted``: the grammar of the text. ``calls``: the rules for tool calls. With ``must_call`` the answer consists of
    calls. Otherwise it is ``wanted`` or calls, or any text with calls in it. Raises ``InvalidRequest``. It may take
    long, so it is called in a thread.
    """
    subgrammars: list[dict[str, str]] = []
    if calls is not None:
        calls.check_size()
    if calls is None:
        if wanted is None or thoughts is Thoughts.NONE:
            return wanted
        field, rules = wanted.field, _rules(wanted, subgrammars)
    elif must_call:
        field, rules = "tools", ["answer: calls", *calls.alone()]
    elif wanted is not None:
        field = wanted.field
        rules = ["answer: other | calls", *_rules(wanted, subgrammars, "other"), *calls.alone()]
    else:
        field, rules = "tools", calls.among_words()
    lines = "\n".join([*_BEGINNINGS[thoughts], *rules]) + "\n"
    if subgrammars:
        lines = json.dumps({"grammars": [{"name": "whole", "lark_grammar": lines}, *subgrammars]}, ensure_ascii=False)
    grammar = Grammar("lark", lines, field, composed=True)
    if grammar.size > MAX_GRAMMAR_BYTES:
        raise InvalidGrammar.at(
            field, f"its grammar has {grammar.size} bytes: at most {MAX_GRAMMAR_BYTES}; make it smaller"
        )
    return grammar


def explain(error: InvalidRequest, grammar: Grammar) -> InvalidRequest:
    """Return a scheduler's ``error`` about ``grammar`` with the field of the caller."""
    error.field = grammar.field
    if grammar.composed:  # positions in a text that the caller does not know
        error.message = _POSITION.sub("", error.message)
    return error


_BLANKS = r"BLANKS: /[ \n\r\t]{1,8}/"
_THOUGHT = 'thought[suffix="</think>"]: /(?s:.*)/'
_BEGINNINGS = {
    Thoughts.NONE: ["start: answer"],
    Thoughts.MAYBE: [
        "start: (OPENING thought BLANKS?)? answer",
        r"OPENING: /[ \n\r\t]{0,8}<think>/",
        _THOUGHT,
        _BLANKS,
    ],
    Thoughts.OPENED: ["start: thought BLANKS? answer", _THOUGHT, _BLANKS],
}


def _rules(grammar: Grammar, subgrammars: list[dict[str, str]], name: str = "answer") -> list[str]:
    """Return the rules for ``name``. A grammar in Lark is appended to ``subgrammars``, and the rule refers to it."""
    match grammar.kind:
        case "json_schema":
            return [f"{name}: {json_rule(_schema(grammar))}"]
        case "regex":
            return [f"{name}: {regex_rule(grammar.text)}"]
        case "choices":
            return [f"{name}: CHOICE", f"CHOICE: {choice_terminal(grammar.value)}"]
    subgrammars.append({"name": "given", "lark_grammar": grammar.text})
    return [f"{name}: @given"]


def _schema(grammar: Grammar) -> dict[str, Any]:
    try:
        schema = read_schema(grammar.text)
        json_size(schema, MAX_GRAMMAR_BYTES)  # raises ValueError if it is too deep
        return schema
    except InvalidRequest as error:
        reason = error.message
    except (ValueError, RecursionError) as error:
        reason = f"the schema cannot be read as JSON: {error}"
    raise InvalidGrammar(reason, field=grammar.field)
