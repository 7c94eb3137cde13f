"""One line as a request to this very gateway: the endpoint that answers HTTP answers it, in process."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import orjson
import structlog
from fastapi import Request, Response

from services.common.batch_line import parse_line
from services.common.errors import Internal, InvalidRequest, Overloaded, TokaError, Unavailable
from services.gateway.batch.lines import parse
from services.gateway.batch.slots import Slot
from services.gateway.http.errors import to_response
from services.gateway.http.lines import Line
from services.gateway.http.request import CALLER, Caller, name_request
from services.gateway.openai.json_value import write_again
from services.gateway.openai.parse import IGNORED_HEADER
from services.gateway.store.ids import new_id
from services.gateway.store.leases import Outcome
from services.gateway.store.tables import StoredBatch

log = structlog.get_logger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]

LOW_PRIORITY = 1
_RESPONSES = "/v1/responses"
# A line that was lost so often with the scheduler that had it may be what kills schedulers.
MAX_LOSSES = 30
# Line ends to Unicode, and to str.splitlines; not to JSON.
_SEPARATORS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0


class Requests:
    """Asks the endpoints of ``gateway``."""

    def __init__(self, gateway: Any, endpoints: Mapping[str, Endpoint]) -> None:
        self._app = SimpleNamespace(state=SimpleNamespace(gateway=gateway))
        self._gateway = gateway
        self._endpoints = endpoints

    async def run(self, batch: StoredBatch, number: int, text: bytes, line: Line, slot: Slot) -> Outcome:
        """What becomes of a line of ``batch``, which waits for a scheduler, and without its ``slot`` for its key's
        tokens, as long as it takes. Raises ``Displaced``, and what is a defect of ours."""
        return await line.hold(partial(self._run, batch, number, text, line, slot))

    async def _run(self, batch: StoredBatch, number: int, text: bytes, line: Line, slot: Slot) -> Outcome:
        request = await parse(text)
        body = dict(request["body"])
        if line.refusal is not None:
            response = to_response(line.refusal)
        elif (name := next((name for name in ("stream", "background") if body.get(name)), None)) is not None:
            error = InvalidRequest(f"{name}: not in a batch; leave it out", field=name, reason="INVALID_VALUE")
            response = to_response(error)
        else:
            priority = body.get("priority")
            if priority is None or (type(priority) is int and priority < LOW_PRIORITY):
                body["priority"] = LOW_PRIORITY
            stores = batch.endpoint == _RESPONSES and body.get("store") is None  # without being asked to
            if body.get("store") is True or stores:
                body["store"] = False  # the batch keeps it
            isolated = self._gateway.guard.isolates
            caller = Caller("", batch.fairness_key, batch.key_name, isolated=isolated, line=line)
            try:
                raw = write_again(body)
            except InvalidRequest as error:
                response = to_response(error)
            else:
                response = await self._persistently(batch.endpoint, raw, caller, slot)
        return outcome(number, request["custom_id"], response)

    async def _persistently(self, endpoint: str, raw: bytes, caller: Caller, slot: Slot) -> Response:
        losses, pause = 0, _FIRST_PAUSE_S
        while True:
            waiting = bool(self._gateway.fleet.trouble)
            try:
                try:
                    return await self.ask(endpoint, raw, caller)
                except Overloaded:
                    if caller.line is None or not caller.line.wants_tokens:
                        raise
                    await _wait_for_tokens(caller.line, slot)
                    continue
            except Overloaded as error:
                pause = max(pause, error.retry_after_s)
            except Unavailable as error:
                losses += not waiting
                if losses > MAX_LOSSES:
                    return to_response(error)
            except TokaError as error:
                return to_response(error)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE_S)

    async def ask(self, endpoint: str, raw: bytes, caller: Caller) -> Response:
        """The endpoint's response, not streamed, to a body of ``raw``. Raises what it raises."""
        unread = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await asyncio.get_running_loop().create_future()  # nobody leaves
            raise AssertionError

        scope = {
            "type": "http",
            "method": "POST",
            "path": endpoint,
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "app": self._app,
            CALLER: caller,
        }
        try:
            return await self._endpoints[endpoint](Request(scope, receive))
        except TokaError as error:
            raise self._gateway.guard.told(error) from None


async def _wait_for_tokens(line: Line, slot: Slot) -> None:
    """Others run meanwhile. Raises as ``Line.wait_for_tokens``."""
    slot.give_back()
    refusal = None
    try:
        await line.wait_for_tokens()
    except TokaError as error:
        refusal = error
    await slot.take()
    if refusal is not None:
        raise refusal


def failed(batch: StoredBatch, number: int, text: bytes) -> Outcome:
    """Of a line with which something went wrong that nobody foresaw: the log has it under the ``request_id`` that the
    error file tells. To be called where the exception is handled."""
    if not _request_id():
        name_request({"path": batch.endpoint})
    log.exception("batch line failed", id=batch.id, line=number)
    custom_id = None
    with contextlib.suppress(ValueError, KeyError, TypeError):  # the file may be another than was validated
        custom_id = parse_line(text)["custom_id"]
    return outcome(number, custom_id, to_response(Internal.logged()))


def outcome(number: int, custom_id: str | None, response: Response) -> Outcome:
    """``response`` as a line of the output or the error file."""
    line = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id") or _request_id(),
            "body": orjson.Fragment(response.body),
            **_ignored(response),
        },
        "error": None,
    }
    ok = response.status_code == 200
    usage = _usage(bytes(response.body)) if ok else (0, 0, 0, 0)
    return Outcome(number, ok, _one_line(line), *usage)


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """A line of the error file for a request that was never answered."""
    line = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return _one_line(line)


def _ignored(response: Response) -> dict[str, list[str]]:
    names = response.headers.get(IGNORED_HEADER)
    return {"ignored_params": names.split(",")} if names else {}


def _request_id() -> str:
    """Of what this task asked last; empty when it was refused before."""
    request_id: str = structlog.contextvars.get_contextvars().get("request_id", "")
    return request_id


def _one_line(document: dict[str, Any]) -> bytes:
    """JSON on a line that stays one, whatever its reader takes for the end of a line."""
    text = orjson.dumps(document)
    for separator, escaped in _SEPARATORS:
        text = text.replace(separator, escaped)
    return text + b"\n"


def _usage(body: bytes) -> tuple[int, int, int, int]:
    """Prompt, cached, completion and reasoning tokens, whatever the endpoint calls them."""
    usage = orjson.loads(body).get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens")) or 0
    completion = usage.get("completion_tokens", usage.get("output_tokens")) or 0
    of_prompt = usage.get("prompt_tokens_details", usage.get("input_tokens_details")) or {}
    of_completion = usage.get("completion_tokens_details", usage.get("output_tokens_details")) or {}
    return prompt, of_prompt.get("cached_tokens") or 0, completion, of_completion.get("reasoning_tokens") or 0
