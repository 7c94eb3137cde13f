"""The endpoint that reads weights by name, for trainers that compare them with their own."""

from typing import Annotated, Any

import numpy as np
import orjson
from fastapi import Request, Response
from pydantic import Field

from services.common.errors import InvalidRequest, TokaError
from services.common.keys import ADMIN
from services.common.request_bounds import MAX_TENSOR_VALUES
from services.gateway.engine.each_scheduler import call_all
from services.gateway.openai.body import Body
from services.gateway.openai.parse import ignored_header, validate
from services.gateway.openai.router import Router, parameters, takes
from services.gateway.rollout.request import gateway_of, read_optional
from tokasaurus.scheduler.v1 import tensor_pb2

_SINCE = "1.15"  # version of the contract
_ROWS = 100  # SGLang's default

router = Router(scope=ADMIN)


class ReadTensorBody(Body):
    """``POST /get_weights_by_name``."""

    name: str = Field(min_length=1, max_length=512, description="Name of the tensor, as in the checkpoint.")
    truncate_size: Annotated[int, Field(ge=1, le=MAX_TENSOR_VALUES)] = Field(
        default=_ROWS,
        description="Number of rows, from the first one: the first values of a vector, the first rows of a matrix. They"
        f" may have at most {MAX_TENSOR_VALUES:,} values.",
    )


_QUERY = parameters(
    {"name": "name", "in": "query", "required": True, "schema": {"type": "string", "maxLength": 512}},
    {"name": "truncate_size", "in": "query", "schema": {"type": "integer", "minimum": 1, "default": _ROWS}},
)


@router.post("/get_weights_by_name", openapi_extra=takes(ReadTensorBody.model_json_schema()))
async def post_weights_by_name(request: Request) -> Response:
    """Return the first rows of a tensor of the checkpoint as it lies in memory, as SGLang does.

    The values of all ranks are joined. With several schedulers, the response is a list with the rows of each.
    """
    return await _read(request, await read_optional(request, ReadTensorBody))


@router.get("/get_weights_by_name", openapi_extra=_QUERY)
async def get_weights_by_name(request: Request) -> Response:
    """Return the first rows of a tensor of the checkpoint, as ``POST`` does. A JSON body has precedence."""
    if int(request.headers.get("content-length", 0)) or "transfer-encoding" in request.headers:
        return await _read(request, await read_optional(request, ReadTensorBody))
    given: dict[str, Any] = dict(request.query_params)
    if "truncate_size" in given:
        text = given["truncate_size"]
        given["truncate_size"] = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else text
    return await _read(request, validate(given, ReadTensorBody))


async def _read(request: Request, body: ReadTensorBody) -> Response:
    message, gateway = tensor_pb2.ReadTensorRequest(name=body.name, rows=body.truncate_size), gateway_of(request)
    try:
        found = await call_all(
            gateway.fleet.replicas, lambda stub: stub.ReadTensor, message, since=_SINCE, timeout_s=None
        )
    except InvalidRequest as error:
        raise _in_own_words(error) from None
    return Response(
        await gateway.text.in_thread(_write, found), headers=ignored_header(body), media_type="application/json"
    )


def _write(found: list[tensor_pb2.ReadTensorResponse]) -> bytes:
    tensors = [np.asarray(each.values, np.float32).reshape(tuple(each.shape)) for each in found]
    document = tensors[0] if len(tensors) == 1 else tensors
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def _in_own_words(error: InvalidRequest) -> TokaError:
    error.field = "truncate_size" if error.field == "rows" else error.field
    return error
