"""Bytes of a request to a validated body; whatever is wrong with them as ``InvalidRequest`` naming the parameter."""

from collections.abc import Iterator, Sequence
from typing import TypeVar
from urllib.parse import quote

import orjson
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.gateway.openai.body import Body
from services.gateway.openai.other_names import rename
from services.gateway.openai.problems import describe
from services.gateway.openai.unsupported import HARMLESS, UNSUPPORTED, refuse_unsupported
from services.gateway.text import TextEngine

IGNORED_HEADER = "x-toka-ignored-params"
MAX_PARAMETERS = 1024
_LONGEST_HEADER = 1024

B = TypeVar("B", bound=Body)


async def parse_large(text: TextEngine, raw: bytes, kind: type[B]) -> B:
    """``parse``, in one of ``text``'s threads when there is much to parse."""
    return await text.worked(len(raw), parse, raw, kind)


def parse(raw: bytes, kind: type[B]) -> B:
    """The body ``raw`` as ``kind``. Raises ``InvalidRequest``."""
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", reason="INVALID_JSON") from None
    if not isinstance(document, dict):
        raise InvalidRequest(
            f'the body must be a JSON object, not {type(document).__name__}: {{"model": ...}}', reason="INVALID_JSON"
        )
    if len(document) > MAX_PARAMETERS:
        raise InvalidRequest(f"the body has {len(document)} parameters: at most {MAX_PARAMETERS}")
    if document.get("best_of") is not None and document.get("best_of") == document.get("n", 1):
        del document["best_of"]  # the best n of n
    given = rename(document, kind.other_names)
    refuse_unsupported(document, kind)
    try:
        body = kind.model_validate(document)
    except ValidationError as error:
        raise describe(error, given) from None
    if given:
        body.remember(given)
    return body


def ignored_header(body: Body, more: Sequence[str] = ()) -> dict[str, str]:
    """The header that lists what the client sent and this server does not know, and ``more``; empty when there is
    nothing."""
    unknown = [*more]
    known = (HARMLESS, UNSUPPORTED, body.elsewhere)
    unknown += [name for name in body.model_extra or {} if not any(name in names for names in known)]
    unknown += _unknown_inside(body, "")
    return ignored_names(unknown)


def _unknown_inside(body: Body, path: str) -> Iterator[str]:
    """Yield the unknown members of the objects in ``body``, each with its path, such as ``messages.content.x``."""
    for name in body.nested:
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Body):
                yield from (f"{path}{name}.{extra}" for extra in part.model_extra or {})
                yield from _unknown_inside(part, f"{path}{name}.")


def ignored_names(unknown: Sequence[str]) -> dict[str, str]:
    """The header that lists the parameters ``unknown`` to this server; empty when there are none."""
    return listed_as_ignored([quote(name[:64], safe="._-") for name in unknown])


def listed_as_ignored(names: Sequence[str]) -> dict[str, str]:
    """The header that lists ``names``, which are all ASCII."""
    return {IGNORED_HEADER: ",".join(dict.fromkeys(names))[:_LONGEST_HEADER]} if names else {}
