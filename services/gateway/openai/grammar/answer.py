"""The grammar of a whole answer: thoughts, then what was wanted, or calls, or both."""

import json
import re
from enum import Enum
from typing import Any

from services.common.errors import InvalidRequest
from services.common.text.grammar_text import MAX_GRAMMAR_BYTES, choice_terminal, json_rule, regex_rule
from services.common.text.json_schema import read_schema
from services.gateway.engine.request import Grammar
from services.gateway.openai.grammar.calls import CallRules
from services.gateway.openai.json_value import json_size

GRAMMAR_FIELD = "sampling.grammar"  # in the contract
_POSITION = re.compile(r"at \d+\(\d+\): ")


class Thoughts(Enum):
    """What an answer may begin with."""

    NONE = "none"  # the model has none, or they are behind it
    MAYBE = "maybe"  # it opens them itself, if it likes
    OPENED = "opened"  # by the prompt


def compose(wanted: Grammar | None, calls: CallRules | None, *, must_call: bool, thoughts: Thoughts) -> Grammar | None:
    """None when the answer may be anything. Where there are ``calls``, the answer is made of them, if it ``must_call``;
    else of ``wanted``, or of any text with calls in it. Raises ``InvalidRequest``. Work for a thread."""
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
        raise InvalidRequest(
            f"{field}: the grammar that is made of it has {grammar.size} bytes: at most {MAX_GRAMMAR_BYTES}; give less",
            field=field,
            reason="INVALID_GRAMMAR",
        )
    return grammar


def explain(error: InvalidRequest, grammar: Grammar) -> InvalidRequest:
    """What a scheduler says of ``grammar``, in the caller's words."""
    error.field = grammar.field
    if grammar.composed:  # of a text that the caller has never seen
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
    """Rules for ``name``. A grammar that has rules of its own goes into ``subgrammars``."""
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
        json_size(schema, MAX_GRAMMAR_BYTES)  # so deep that no more can be done with it
        return schema
    except InvalidRequest as error:
        reason = error.message
    except (ValueError, RecursionError) as error:
        reason = f"the schema cannot be read as JSON: {error}"
    raise InvalidRequest(reason, field=grammar.field, reason="INVALID_GRAMMAR")
