"""The checks of answers over HTTP."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from bench.fuzz.asks import FOREIGN_SITE, Ask
from bench.fuzz.canary import marks
from bench.fuzz.connection import Reply
from bench.fuzz.expected import Expected
from bench.fuzz.findings import Wrong
from bench.fuzz.kept import Kept

_STATUSES = frozenset({200, 400, 401, 403, 404, 405, 408, 409, 411, 413, 414, 415, 422, 426, 429, 431, 529})
# Allowed only as an answer to a request with these bytes: a transfer coding (RFC 9112, 6.1), and a `timeout`.
_IF_ASKED = {501: b"transfer-encoding:", 504: b"timeout"}
_OPEN = ("/health", "/ready", "/ping")
_KEPT = ("/v1/files", "/v1/batches", "/v1/responses/")


class Judge:
    """The checker of all answers of a run."""

    def __init__(self, expected: Expected, kept: Kept) -> None:
        self._expected, self._kept = expected, kept

    def look(self, ask: Ask, reply: Reply) -> None:
        """Raise ``Wrong`` if ``reply`` is no allowed answer to ``ask``."""
        if reply.broken:
            raise Wrong("no HTTP", reply.broken)
        self._check_marks(ask, reply)
        if ask.leaves_after is not None:
            return
        if reply.status == 0:
            if ask.is_http and not ask.stops:
                raise Wrong("closed", "the connection was closed without an answer")
            return
        if not reply.whole and ask.method != "HEAD":
            raise Wrong("cut", f"status {reply.status}, and the answer has no end")
        asked_for = _IF_ASKED.get(reply.status)
        if reply.status not in _STATUSES and (asked_for is None or asked_for not in ask.data.lower()):
            raise Wrong("status", f"{reply.status}: {reply.body[:500]!r}")
        if ask.owner is None and ask.is_http and reply.status < 300 and not self._is_open(ask.path):
            raise Wrong("let in", f"{ask.path} without a right key: {reply.status}")
        if FOREIGN_SITE in ask.data and reply.status < 300:
            raise Wrong("let in", f"a foreign web page: {reply.status} for {ask.data!r}")
        if ask.body is not None and reply.status not in (200, 429):
            raise Wrong("refused", f"a right request: {reply.status}: {reply.body[:500]!r}")
        if ask.method == "HEAD":
            return
        if reply.status >= 400:
            if reply.status == 429 and not reply.headers.get(b"retry-after", b"").isdigit():
                raise Wrong("error", "429 without retry-after")
            check_error(parsed(reply.body))
        elif reply.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            self._check_stream(ask, reply)
        elif reply.headers.get(b"content-type", b"").startswith(b"application/json"):
            self._check_answer(ask, parsed(reply.body))

    def _check_marks(self, ask: Ask, reply: Reply) -> None:
        found = marks(reply.raw)
        if not found or found <= (own := marks(ask.data)):
            return
        path = unquote(ask.path)
        of_others = {mark for mark in found - own if not self._kept.may_see(ask.owner, mark)}
        if of_others or not path.startswith(_KEPT):
            raise Wrong("leak", f"marks of others, {sorted(of_others or found - own)[:5]}, in {reply.raw[:500]!r}")

    def _is_open(self, path: str) -> bool:
        # The admin's key is valid for this path only.
        return path.partition("?")[0] in (*_OPEN, "/metrics")

    def _check_stream(self, ask: Ask, reply: Reply) -> None:
        events = list(_events(reply.body))
        for event in events:
            if "error" in event and event["error"] is not None and event.get("object") != "response":
                check_error(event)
                if event["error"].get("type") in ("server_error", "api_error"):
                    raise Wrong("status", f"an error of the server within a stream: {event}")
        if ask.body is not None:
            self._expected.check_stream(ask.body, events)

    def _check_answer(self, ask: Ask, answer: Any) -> None:
        if isinstance(answer, dict):
            for name in ("id", "output_file_id", "error_file_id", "input_file_id"):
                identity = answer.get(name)
                if (
                    isinstance(identity, str)
                    and ask.owner is not None
                    and ask.path.startswith(("/v1/files", "/v1/batches", "/v1/responses"))
                ):
                    if self._kept.owner(identity) not in (None, ask.owner):
                        raise Wrong("let in", f"{identity} is another's")
                    self._kept.note(identity, ask.owner)
        if ask.body is not None:
            self._expected.check_whole(ask.body, answer)
        elif isinstance(answer, dict) and isinstance(answer.get("choices"), list):
            self._expected.check_greedy(ask.data, answer)


def parsed(body: bytes) -> Any:
    """Parse a JSON body. Raises ``Wrong`` if it is no JSON."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise Wrong("no JSON", f"{error}: {body[:500]!r}") from error


def check_error(answer: Any) -> None:
    """Check that an error has OpenAI's shape or Anthropic's. Raises ``Wrong``."""
    error = answer.get("error") if isinstance(answer, dict) else None
    right = isinstance(error, dict) and all(
        isinstance(error.get(name), str) and error[name] for name in ("message", "type")
    )
    if right and answer.get("type") == "error":
        right = isinstance(answer.get("request_id"), str)
    else:
        right = right and all(isinstance(error.get(name, 0), str | None) for name in ("param", "code"))
    if not right:
        raise Wrong("error", f"neither OpenAI's shape nor Anthropic's: {answer!r}"[:500])


def _events(body: bytes) -> Iterator[dict[str, Any]]:
    blocks = body.removesuffix(b"\n\n").split(b"\n\n")
    for block in blocks:
        data = b"".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        if data == b"[DONE]":
            continue
        event = parsed(data)
        if not isinstance(event, dict):
            raise Wrong("no JSON", f"an event that is no object: {block[:200]!r}")
        yield event
