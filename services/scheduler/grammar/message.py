"""Converts a Grammar message to llguidance's text."""

import asyncio
import contextlib
import json
from functools import lru_cache

from llguidance import LLMatcher

from services.common.errors import InvalidRequest
from services.common.text.grammar_text import JSON_OPTIONS, MAX_GRAMMAR_BYTES, choice_terminal, regex_rule
from services.common.text.json_schema import read_schema, tightened
from services.scheduler.grammar.attributes import unsupported_attribute
from tokasaurus.common.v1.sampling_pb2 import Choices, Grammar, Sampling

FIELD = "sampling.grammar"
_CACHED = 64  # texts of the last grammars, since many prompts often use the same grammar
_LONG_BYTES = 32 * 1024
_NAMES = {
    "json_schema": "the JSON schema", "regex": "the regular expression", "choices": "the list of choices",
    "lark": "the grammar",
}  # fmt: skip


async def cache_long_text(sampling: Sampling) -> None:
    """Convert a large grammar in a thread, which takes about 10 ms. ``grammar_text`` then uses the cached text."""
    if sampling.HasField("grammar") and sampling.grammar.ByteSize() > _LONG_BYTES:
        with contextlib.suppress(InvalidRequest):  # ``grammar_text`` raises it again
            await asyncio.to_thread(grammar_text, sampling.grammar)


def grammar_text(grammar: Grammar) -> str:
    """Return the text of ``grammar`` without compiling it. Any thread may call. Raises ``InvalidRequest``.

    Equal grammars get the same object while it is cached.
    """
    kind = grammar.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest(
            "the grammar has no kind: set json_schema, regex, choices or lark, or leave it out",
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
    text, error = _cached(grammar.SerializeToString())
    if error:
        raise InvalidRequest(error, field=FIELD, reason="INVALID_GRAMMAR")
    return text


@lru_cache(maxsize=_CACHED)
def _cached(serialized: bytes) -> tuple[str, str]:
    """Return the text and an empty string, or an empty string and the error."""
    try:
        return _text(Grammar.FromString(serialized)), ""
    except InvalidRequest as error:
        return "", error.message


def _text(grammar: Grammar) -> str:
    match grammar.WhichOneof("kind"):
        case "json_schema":
            return _json_schema(grammar.json_schema)
        case "regex":
            return f"start: {regex_rule(grammar.regex)}"
        case "choices":
            return _choices(grammar.choices)
    if not grammar.lark.strip():
        raise InvalidRequest("the grammar is empty: it needs a rule `start`", field=FIELD)
    if idle := unsupported_attribute(grammar.lark):
        raise InvalidRequest(f"the grammar cannot be followed: {idle}", field=FIELD)
    return grammar.lark


def name_of(grammar: Grammar) -> str:
    """Return the name of the grammar's kind for error messages."""
    return _NAMES[grammar.WhichOneof("kind")]


def _json_schema(text: str) -> str:
    try:
        tight = json.dumps(tightened(read_schema(text)), ensure_ascii=False)
        return LLMatcher.grammar_from_json_schema(tight, overrides=JSON_OPTIONS)  # type: ignore[arg-type]  # the stub expects a TypedDict
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema cannot be read as JSON: {error}", field=FIELD) from None


def _choices(choices: Choices) -> str:
    if not choices.texts:
        raise InvalidRequest("there are no choices: give at least one text", field=FIELD)
    return f"start: CHOICE\nCHOICE: {choice_terminal(list(choices.texts))}"
