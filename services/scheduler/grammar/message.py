"""A Grammar of the contract as one text in llguidance's forms."""

import asyncio
import contextlib
import json
from functools import lru_cache

from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.common.text.grammar_text import JSON_OPTIONS, MAX_GRAMMAR_BYTES, choice_terminal, regex_rule
from services.common.text.json_schema import read_schema, tightened
from services.scheduler.grammar.attributes import idle_attribute
from tokasaurus.scheduler.v1 import generate_pb2

FIELD = "sampling.grammar"
_KEPT = 64  # texts of the last grammars: those of many prompts come one behind the other
_LONG_BYTES = 32 * 1024
_NAMES = {
    "json_schema": "the JSON schema", "regex": "the regular expression", "choices": "the list of choices",
    "lark": "the grammar",
}  # fmt: skip


async def keep_long_text(sampling: generate_pb2.Sampling) -> None:
    """Have a thread make what would take ``grammar_text`` some 10 ms; then it is kept."""
    if sampling.HasField("grammar") and sampling.grammar.ByteSize() > _LONG_BYTES:
        with contextlib.suppress(InvalidRequest):  # it is told when the request is read
            await asyncio.to_thread(grammar_text, sampling.grammar)


def grammar_text(grammar: generate_pb2.Grammar) -> str:
    """Whether it compiles is found out later. Equal grammars get the same object, as long as it is kept. Any thread.
    Raises ``InvalidRequest``."""
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(
            "the grammar is of no kind: set json_schema, regex, choices or lark, or leave it out",
            field=FIELD,
            reason="INVALID_GRAMMAR",
        )
    size = grammar.ByteSize()
    if size > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"{name_of(grammar)} has {size} bytes: expected at most {MAX_GRAMMAR_BYTES}",
            field=FIELD,
            reason="INVALID_GRAMMAR",
        )
    text, trouble = _kept(grammar.SerializeToString())
    if trouble:
        raise InvalidRequest(trouble, field=FIELD, reason="INVALID_GRAMMAR")
    return text


@lru_cache(maxsize=_KEPT)
def _kept(serialized: bytes) -> tuple[str, str]:
    """The text, or else what is wrong."""
    try:
        return _text(generate_pb2.Grammar.FromString(serialized)), ""
    except InvalidRequest as error:
        return "", error.message


def _text(grammar: generate_pb2.Grammar) -> str:
    match grammar.WhichOneof("kind"):
        case "json_schema":
            return _json_schema(grammar.json_schema)
        case "regex":
            return f"start: {regex_rule(grammar.regex)}"
        case "choices":
            return _choices(grammar.choices)
    if not grammar.lark.strip():
        raise InvalidRequest("the grammar is empty: it needs a rule `start`", field=FIELD)
    if idle := idle_attribute(grammar.lark):
        raise InvalidRequest(f"the grammar cannot be followed: {idle}", field=FIELD)
    return grammar.lark


def name_of(grammar: generate_pb2.Grammar) -> str:
    """What an error calls it."""
    return _NAMES[grammar.WhichOneof("kind")]


def _json_schema(text: str) -> str:
    try:
        tight = json.dumps(tightened(read_schema(text)), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(tight, overrides=JSON_OPTIONS)  # type: ignore[arg-type]  # a TypedDict there
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema cannot be read as JSON: {error}", field=FIELD) from None


def _choices(choices: generate_pb2.Choices) -> str:
    if not choices.texts:
        raise InvalidRequest("there are no choices: give at least one text", field=FIELD)
    return f"start: CHOICE\nCHOICE: {choice_terminal(list(choices.texts))}"
