"""Parsing and validation of request bodies. Errors are ``InvalidRequest`` and name the parameter."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

import orjson
from pydantic import ValidationError

from services.common.errors import InvalidRequest
from services.common.json_scan import Bulk, Raw
from services.common.large_json import count_marks, load
from services.gateway.engine.text import INLINE_BYTES, TextEngine
from services.gateway.http.request import Posted
from services.gateway.openai.body import Body, UnknownNames
from services.gateway.openai.problems import describe
from services.gateway.openai.unsupported import HARMLESS, UNSUPPORTED, refuse_unsupported, rename, same

IGNORED_HEADER = "x-toka-ignored-params"
MAX_PARAMETERS = 1024
_LONGEST_HEADER = 1024
_MAX_IGNORED = 1024  # unknown names that a body keeps, more than fit into the header
_INLINE_MARKS = 1024  # JSON marks of a body that is parsed on the event loop, in 3 ms

B = TypeVar("B", bound=Body)
R = TypeVar("R")


async def parse_large(text: TextEngine, posted: Posted, kind: type[B]) -> B:
    """Return the body ``posted`` as ``kind``. Raises InvalidRequest.

    A body that takes more than 5 ms is parsed in a thread of ``text``.
    """
    if posted.size:
        return await text.worked(posted.size, validate, posted.document, kind)
    return await off_loop(text, posted.raw, parse, kind)


async def off_loop(text: TextEngine, raw: Raw, work: Callable[..., R], *arguments: Any) -> R:
    """Return ``work(raw, *arguments)``. If ``raw`` is large or has many values, call it in a thread of ``text``."""
    if len(raw) <= INLINE_BYTES and count_marks(raw) <= _INLINE_MARKS:
        return work(raw, *arguments)
    return await text.in_thread(work, raw, *arguments)


def read_json(raw: Raw, bulks: Mapping[str, Bulk] | None = None) -> Any:
    """Return the JSON value of ``raw``. ``bulks``: see ``load``. Raises ``InvalidRequest``."""
    try:
        return load(raw, bulks)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", reason="INVALID_JSON") from None


def parse(raw: Raw, kind: type[B]) -> B:
    """Return the body ``raw`` as ``kind``. Raises InvalidRequest for the first error."""
    return validate(read_json(raw, kind.bulks), kind)


def validate(document: Any, kind: type[B]) -> B:
    """Return the JSON value ``document`` as ``kind``. Raises InvalidRequest for the first error."""
    if not isinstance(document, dict):
        raise InvalidRequest(
            f'the body must be a JSON object, not {type(document).__name__}: {{"model": ...}}', reason="INVALID_JSON"
        )
    if len(document) > MAX_PARAMETERS:
        raise InvalidRequest(f"the body has {len(document)} parameters: at most {MAX_PARAMETERS}")
    document = dict(document)  # the caller keeps its own: a Batch line may be sent again
    best_of = document.get("best_of")
    if best_of is not None and same(best_of, document.get("n", 1), "best_of"):
        del document["best_of"]  # the best n of n samples are all samples
    given = rename(document, kind.other_names)
    refuse_unsupported(document, kind)
    try:
        body = kind.model_validate(document, context=UnknownNames(_MAX_IGNORED))
    except ValidationError as error:
        raise describe(error, given) from None
    body.remember(given, tuple(_unknown(body)))
    return body


def ignored_header(body: Body, more: Sequence[str] = ()) -> dict[str, str]:
    """Return the header that lists ``more`` and the unknown parameters of ``body``. Empty if there are none."""
    return ignored_names([*more, *body.ignored])


def _unknown(body: Body) -> Iterator[str]:
    """Yield the unknown parameters of ``body`` and of the objects in it."""
    known = (HARMLESS, UNSUPPORTED, body.elsewhere)
    own = (name for name in body.model_extra or {} if not any(name in names for names in known))
    yield from islice(own, _MAX_IGNORED)
    yield from dict.fromkeys(islice(_unknown_inside(body, ""), _MAX_IGNORED))


def _unknown_inside(body: Body, path: str) -> Iterator[str]:
    """Yield the unknown members of the objects in ``body``, each with its path, such as ``messages.content.x``."""
    for name in body.nested:
        value = getattr(body, name)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Body):
                yield from (f"{path}{name}.{extra}" for extra in part.model_extra or {})
                yield from _unknown_inside(part, f"{path}{name}.")


def ignored_names(unknown: Sequence[str]) -> dict[str, str]:
    """Return the header that lists the ``unknown`` parameters. Empty if there are none."""
    return listed_as_ignored([quote(name[:64], safe="._-") for name in unknown])


def listed_as_ignored(names: Sequence[str]) -> dict[str, str]:
    """Return the header that lists ``names``, which are all ASCII."""
    return {IGNORED_HEADER: ",".join(dict.fromkeys(names))[:_LONGEST_HEADER]} if names else {}
