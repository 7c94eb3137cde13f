"""The lines of Batch jobs as calls of the gateway's endpoints, without HTTP."""

import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
import structlog
from fastapi import Response

from services.common.batch_line import is_large, parse_line
from services.common.errors import Internal, InvalidValue, Overloaded, TokaError, Unavailable
from services.gateway.batch.lines import parse
from services.gateway.batch.slots import Slot
from services.gateway.http.errors import to_response
from services.gateway.http.lines import Line
from services.gateway.http.request import Caller, Posted, name_request
from services.gateway.openai import chat, completions
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.json_value import may_be_too_deep, write_again
from services.gateway.openai.parse import IGNORED_HEADER
from services.gateway.openai.responses import routes as responses
from services.gateway.openai.router import Endpoint
from services.gateway.store.ids import new_id
from services.gateway.store.leases import LineOutcome
from services.gateway.store.tables import StoredBatch

log = structlog.get_logger(__name__)

# Endpoints that a Batch job may call, by path.
BATCHABLE: Mapping[str, Endpoint] = MappingProxyType(
    completions.router.in_batch | chat.router.in_batch | responses.router.in_batch
)
LOW_PRIORITY = 1
_RESPONSES = "/v1/responses"
# A line that was lost with more schedulers may be the cause.
MAX_LOSSES = 30
# Line ends in Unicode and for str.splitlines, but not in JSON.
_SEPARATORS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 5.0


class Requests:
    """Calls the endpoints of ``gateway``."""

    def __init__(self, gateway: Gateway, endpoints: Mapping[str, Endpoint] = BATCHABLE) -> None:
        self._gateway = gateway
        self._endpoints = endpoints

    async def run(self, batch: StoredBatch, number: int, text: bytes, line: Line, slot: Slot) -> LineOutcome:
        """Run a line of ``batch`` and return its outcome.

        The line waits without a time limit for a scheduler. It also waits for tokens of its key, and other lines use
        its ``slot`` meanwhile. Raises Displaced, and any exception that is a defect of this server.
        """
        return await line.hold(partial(self._run, batch, number, text, line, slot))

    async def _run(self, batch: StoredBatch, number: int, text: bytes, line: Line, slot: Slot) -> LineOutcome:
        request = await parse(text)
        isolated = self._gateway.guard.isolates
        caller = Caller("", batch.fairness_key, batch.key_name, isolated=isolated, line=line)
        try:
            if line.refusal is not None:
                raise line.refusal
            response = await self._persistently(batch.endpoint, _posted(batch, request["body"], text), caller, slot)
        except TokaError as error:
            response = to_response(error)
        return outcome(number, request["custom_id"], response)

    async def _persistently(self, endpoint: str, posted: Posted, caller: Caller, slot: Slot) -> Response:
        """Return the response. Repeat the request while no scheduler can take it. Raises as ``ask`` does."""
        losses, pause = 0, _FIRST_PAUSE_S
        while True:
            waiting = bool(self._gateway.fleet.trouble)
            try:
                try:
                    return await self.ask(endpoint, posted, caller)
                except Overloaded:
                    if caller.line is None or not caller.line.wants_tokens:
                        raise
                    await _wait_for_tokens(caller.line, slot)
                    continue
            except Overloaded as error:
                pause = max(pause, error.retry_after_s)
            except Unavailable:
                losses += not waiting
                if losses > MAX_LOSSES:
                    raise
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LAST_PAUSE_S)

    async def ask(self, endpoint: str, posted: Posted, caller: Caller) -> Response:
        """Return the endpoint's response to ``posted``, which does not ask for a stream.

        Raises TokaError, and any exception that is a defect of this server.
        """
        caller = caller._replace(request_id=name_request({"path": endpoint}), started_at=time.perf_counter())
        try:
            return await self._endpoints[endpoint](self._gateway, posted, caller)
        except TokaError as error:
            raise self._gateway.guard.told(error) from None


def _posted(batch: StoredBatch, given: dict[str, Any], text: bytes) -> Posted:
    """Return the body ``given`` of the line ``text`` as its endpoint gets it. Raises InvalidRequest."""
    if (name := next((name for name in ("stream", "background") if given.get(name)), None)) is not None:
        raise InvalidValue(f"{name}: not in a batch; leave it out", field=name)
    body, priority = dict(given), given.get("priority")
    if priority is None or (type(priority) is int and priority < LOW_PRIORITY):
        body["priority"] = LOW_PRIORITY
    if body.get("store") is True or (batch.endpoint == _RESPONSES and body.get("store") is None):
        body["store"] = False  # the output file has the answer
    # Only parsing checks the number of values of a large body, and only writing checks its depth.
    as_text = is_large(text) or may_be_too_deep(text)
    return Posted(write_again(body)) if as_text else Posted(document=body, size=len(text))


async def _wait_for_tokens(line: Line, slot: Slot) -> None:
    """Wait for tokens of the line's key, without its slot. Raises the errors of ``Line.wait_for_tokens``."""
    slot.give_back()
    refusal = None
    try:
        await line.wait_for_tokens()
    except TokaError as error:
        refusal = error
    await slot.take()
    if refusal is not None:
        raise refusal


def failed(batch: StoredBatch, number: int, text: bytes) -> LineOutcome:
    """Return the outcome of a line that failed because of a defect of this server, and log the current exception.

    The log line has the ``request_id`` of the error file.
    """
    if not _request_id():
        name_request({"path": batch.endpoint})
    log.exception("batch line failed", id=batch.id, line=number)
    custom_id = None
    with contextlib.suppress(ValueError, KeyError, TypeError):  # the file may have been replaced since its validation
        custom_id = parse_line(text)["custom_id"]
    return outcome(number, custom_id, to_response(Internal.logged()))


def outcome(number: int, custom_id: str | None, response: Response) -> LineOutcome:
    """Return ``response`` as a line of the output or the error file."""
    ignored = response.headers.get(IGNORED_HEADER)
    line = {
        "id": new_id("batch_req_"),
        "custom_id": custom_id,
        "response": {
            "status_code": response.status_code,
            "request_id": response.headers.get("x-request-id") or _request_id(),
            "body": orjson.Fragment(response.body),
            **({"ignored_params": ignored.split(",")} if ignored else {}),
        },
        "error": None,
    }
    ok = response.status_code == 200
    usage = _usage(bytes(response.body)) if ok else (0, 0, 0, 0)
    return LineOutcome(number, ok, _one_line(line), *usage)


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Return a line of the error file for a request that was not run."""
    error = {"code": code, "message": message}
    return _one_line({"id": new_id("batch_req_"), "custom_id": custom_id, "response": None, "error": error})


def _request_id() -> str:
    """Return the id of the last request of this task, or an empty string if there was none."""
    request_id: str = structlog.contextvars.get_contextvars().get("request_id", "")
    return request_id


def _one_line(document: dict[str, Any]) -> bytes:
    """Return ``document`` as a line of JSON that no reader splits, whatever characters end a line for it."""
    text = orjson.dumps(document)
    for separator, escaped in _SEPARATORS:
        text = text.replace(separator, escaped)
    return text + b"\n"


def _usage(body: bytes) -> tuple[int, int, int, int]:
    """Return the numbers of prompt, cached, completion and reasoning tokens in a response of any endpoint."""
    usage = orjson.loads(body).get("usage") or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens")) or 0
    completion = usage.get("completion_tokens", usage.get("output_tokens")) or 0
    of_prompt = usage.get("prompt_tokens_details", usage.get("input_tokens_details")) or {}
    of_completion = usage.get("completion_tokens_details", usage.get("output_tokens_details")) or {}
    return prompt, of_prompt.get("cached_tokens") or 0, completion, of_completion.get("reasoning_tokens") or 0
