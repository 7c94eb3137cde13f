"""``/v1/batches``."""

import contextlib
from typing import Annotated, Literal

from fastapi import Request, Response
from pydantic import Field

from services.common.errors import AlreadyExists, InvalidValue, NotFound
from services.gateway.batch.requests import BATCHABLE
from services.gateway.http.errors import response
from services.gateway.http.idempotency import fingerprint
from services.gateway.http.request import Posted, read_body, read_caller
from services.gateway.openai.body import Body, Id
from services.gateway.openai.fields import Metadata
from services.gateway.openai.parse import ignored_header, parse_large
from services.gateway.openai.router import AFTER, Router, limit, parameters, takes
from services.gateway.store.files import BATCH_FILES_EXPIRE_S
from services.gateway.store.ids import new_id, now
from services.gateway.store.queries import Query
from services.gateway.store.service import opened
from services.gateway.store.shapes import batch_object, page
from services.gateway.store.tables import VALIDATING, StoredBatch

MAX_PAGE = 100
WINDOWS_S = {"24h": 24 * 3600}

router = Router(head=False)


class OutputExpiresAfter(Body):
    """The lifetime of a Batch job's output files."""

    anchor: Literal["created_at"] = Field(description="The time is counted from the creation of the files.")
    seconds: Annotated[int, Field(ge=3600, le=30 * 24 * 3600)]


class BatchBody(Body):
    """``POST /v1/batches``."""

    input_file_id: Id = Field(description="Id of an uploaded file with purpose=batch.")
    endpoint: str = Field(description="The url of every line.")
    completion_window: Literal["24h"] = Field(description="As in OpenAI's API.")
    metadata: Metadata | None = Field(default=None, description="Returned in the batch.")
    output_expires_after: OutputExpiresAfter | None = Field(
        default=None, description="When the batch's output files are deleted. Default: after 30 days."
    )

    nested = ("output_expires_after",)


@router.post("/v1/batches", openapi_extra=takes(BatchBody.model_json_schema()))
async def create_batch(request: Request) -> Response:
    """Create a Batch job."""
    gateway = request.app.state.gateway
    raw = await read_body(request, gateway.config.max_body_bytes)
    body, caller = await parse_large(gateway.text, Posted(raw), BatchBody), read_caller(request)
    ignored = ignored_header(body)
    store = await opened(request)
    if body.endpoint not in BATCHABLE:
        raise InvalidValue(
            f"invalid value for 'endpoint': expected one of {', '.join(BATCHABLE)} (got {body.endpoint[:64]!r})",
            field="endpoint",
        )
    created_at, expires, batch_id = now(), body.output_expires_after, new_id("batch_")
    if caller.idempotency_key:
        asked = fingerprint(request.url.path, raw)
        batch_id = "batch_" + await store.tries.name(caller.owner, caller.idempotency_key, asked)
        with contextlib.suppress(NotFound):
            return response(200, batch_object(await store.batches.get(batch_id, caller.owner)), ignored)
    batch = StoredBatch(
        id=batch_id,
        pool=store.pool,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        labels=body.metadata,
        fairness_key=caller.fairness_key,
        key_name=caller.owner,
        output_expires_after=expires.seconds if expires is not None else BATCH_FILES_EXPIRE_S,
        status=VALIDATING,
        created_at=created_at,
        expires_at=created_at + WINDOWS_S[body.completion_window],
        total=0,
    )
    try:
        shown = await store.batches.create(batch)
    except AlreadyExists:  # a concurrent retry of the same request created it
        shown = await store.batches.get(batch_id, caller.owner)
    request.app.state.batches.look()
    return response(200, batch_object(shown), ignored)


@router.get("/v1/batches", openapi_extra=parameters(AFTER, limit(MAX_PAGE)))
async def list_batches(request: Request) -> Response:
    """List Batch jobs, the newest first."""
    query = Query(request)
    most = query.number("limit", 20, 1, MAX_PAGE)
    store = await opened(request)
    batches, has_more = await store.batches.page(
        key_name=read_caller(request).owner, after=query.text("after"), limit=most
    )
    return response(200, page([batch_object(shown) for shown in batches], has_more))


@router.get("/v1/batches/{batch_id}")
async def get_batch(request: Request, batch_id: str) -> Response:
    """Return a Batch job, with its progress."""
    return response(200, batch_object(await (await opened(request)).batches.get(batch_id, read_caller(request).owner)))


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a Batch job. The results so far can be downloaded."""
    store = await opened(request)
    shown = await store.batches.cancel(batch_id, read_caller(request).owner)
    request.app.state.batches.look()
    return response(200, batch_object(shown))
