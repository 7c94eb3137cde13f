"""``/v1/files``."""

import contextlib
import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from services.common.boundaries import undo_on_error_async
from services.common.errors import AlreadyExists, InvalidRequest, InvalidValue
from services.gateway.batch.upload import Form, receive_form
from services.gateway.http.errors import response
from services.gateway.http.idempotency import fingerprint
from services.gateway.http.request import Caller, read_caller
from services.gateway.openai.parse import ignored_names
from services.gateway.openai.router import AFTER, ORDER, Router, limit, parameters, takes
from services.gateway.store.blobs import BlobWriter
from services.gateway.store.files import PURPOSES, new_file
from services.gateway.store.queries import Query, whole_number
from services.gateway.store.service import OpenStore, opened
from services.gateway.store.shapes import file_object, page
from services.gateway.store.tables import StoredFile

MAX_PAGE = 10_000
_DOWNLOAD_BLOCK_BYTES = 64 * 1024  # at most three blocks of each client are in memory
EXPIRES_S = (3600, 30 * 24 * 3600)  # the range of OpenAI's API
UPLOAD_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary", "description": "The content, at most 512 MiB."},
        "purpose": {"type": "string", "enum": list(PURPOSES), "description": "batch: the input of a batch."},
        "expires_after[anchor]": {
            "type": "string",
            "enum": ["created_at"],
            "description": "The time is counted from the creation of the file.",
        },
        "expires_after[seconds]": {
            "type": "integer",
            "minimum": EXPIRES_S[0],
            "maximum": EXPIRES_S[1],
            "description": "Seconds until the file is deleted.",
        },
    },
}
_PURPOSE = {"name": "purpose", "in": "query", "schema": {"type": "string"}}
_CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {"schema": {}}}}}

router = Router(head=False)


@router.post("/v1/files", openapi_extra=takes(UPLOAD_SCHEMA, "multipart/form-data"))
async def upload_file(request: Request) -> Response:
    """Store a file."""
    caller = read_caller(request)
    store = await opened(request)
    async with store.transfers.running(caller.owner):
        return await _receive(request, caller, store)


async def _receive(request: Request, caller: Caller, store: OpenStore) -> Response:
    record = await store.files.begin_upload()
    writer = await store.blobs.create(record.blob)
    async with undo_on_error_async(_abandon, store, record, writer):
        digest = hashlib.sha256() if caller.idempotency_key else None
        form = await receive_form(request, writer, digest.update if digest is not None else None)
        done = _described(form, writer.bytes, caller.owner)
        if digest is not None:
            asked = fingerprint(request.url.path, digest.digest(), done.filename, repr(sorted(form.fields.items())))
            done.id = "file-" + await store.tries.name(caller.owner, caller.idempotency_key, asked)
        await writer.close()
    try:
        stored = await store.files.finish_upload(record, done)
    except AlreadyExists:  # an earlier try of the same request stored it
        await _discard(store, record)
        stored = await store.files.get(done.id, caller.owner)
    unknown = [name for name in form.fields if name not in UPLOAD_SCHEMA["properties"]]
    return response(200, file_object(stored), ignored_names(unknown))


async def _abandon(store: OpenStore, record: StoredFile, writer: BlobWriter) -> None:
    await writer.abandon()
    await _discard(store, record)


async def _discard(store: OpenStore, record: StoredFile) -> None:
    await store.blobs.delete(record.blob)
    await store.files.discard(record)


@router.get("/v1/files", openapi_extra=parameters(AFTER, limit(MAX_PAGE), ORDER, _PURPOSE))
async def list_files(request: Request) -> Response:
    """List files, the newest first."""
    query = Query(request)
    most = query.number("limit", MAX_PAGE, 1, MAX_PAGE)
    order = query.one_of("order", ("desc", "asc"))
    store = await opened(request)
    files, has_more = await store.files.page(
        key_name=read_caller(request).owner,
        after=query.text("after"),
        limit=most,
        order=order,
        purpose=query.text("purpose"),
    )
    return response(200, page([file_object(file) for file in files], has_more))


@router.get("/v1/files/{file_id}")
async def get_file(request: Request, file_id: str) -> Response:
    """Return a file object."""
    return response(200, file_object(await (await opened(request)).files.get(file_id, read_caller(request).owner)))


@router.get("/v1/files/{file_id}/content", response_class=Response, responses=_CONTENT)
async def get_file_content(request: Request, file_id: str) -> Response:
    """Return the content of a file."""
    store = await opened(request)
    file = await store.files.get(file_id, read_caller(request).owner)
    headers = {
        "content-length": str(file.bytes),
        "content-disposition": f"attachment; filename*=utf-8''{quote(file.filename, safe='')}",
    }
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(store.transfers.running(file.key_name))
        content = await stack.enter_async_context(aclosing(store.blobs.stream(file.blob, _DOWNLOAD_BLOCK_BYTES)))
        return _Download(await anext(content, b""), content, headers, stack.pop_all())


@router.delete("/v1/files/{file_id}")
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file and its content."""
    store = await opened(request)
    await store.blobs.delete(await store.files.delete(file_id, read_caller(request).owner))
    return response(200, {"id": file_id, "object": "file", "deleted": True})


class _Download(StreamingResponse):
    """A response that sends ``first``, then ``rest``, and closes ``resources`` at its end.

    ``first`` is read before the status is sent, so that an unreadable file is an error response.
    """

    def __init__(
        self,
        first: bytes,
        rest: AsyncGenerator[bytes, None],
        headers: dict[str, str],
        resources: contextlib.AsyncExitStack,
    ) -> None:
        async def content() -> AsyncGenerator[bytes, None]:
            yield first
            async for block in rest:
                yield block

        super().__init__(content(), headers=headers, media_type="application/octet-stream")
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


def _described(form: Form, size: int, key_name: str) -> StoredFile:
    """Return the record that ``form`` asks for. Raises InvalidRequest."""
    fields = form.fields
    if form.filename is None:
        raise InvalidRequest("missing required parameter: 'file'", field="file", reason="MISSING_PARAMETER")
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("missing required parameter: 'purpose'", field="purpose", reason="MISSING_PARAMETER")
    if purpose not in PURPOSES:
        raise InvalidValue(
            f"invalid value for 'purpose': expected one of {', '.join(PURPOSES)} (got {purpose[:64]!r})",
            field="purpose",
        )
    expires_after, seconds = None, fields.get("expires_after[seconds]")
    if seconds is not None:
        expires_after = whole_number("expires_after[seconds]", seconds, *EXPIRES_S)
    if (anchor := fields.get("expires_after[anchor]", "created_at")) != "created_at":
        raise InvalidValue(
            f"invalid value for 'expires_after[anchor]': expected created_at (got {anchor[:64]!r})",
            field="expires_after[anchor]",
        )
    if seconds is None and "expires_after[anchor]" in fields:
        raise InvalidRequest(
            "missing required parameter: 'expires_after[seconds]', which expires_after[anchor] needs",
            field="expires_after[seconds]",
            reason="MISSING_PARAMETER",
        )
    return new_file(form.filename, purpose, blob="", size=size, expires_after=expires_after, key_name=key_name)
