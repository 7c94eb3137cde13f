"""Which paths of files and batches lead where, for the application."""

from typing import Any

from fastapi import FastAPI

from services.gateway.batch import batch_routes, file_routes
from services.gateway.batch.batch_routes import BatchBody, cancel_batch, create_batch, get_batch, list_batches
from services.gateway.batch.file_routes import (
    UPLOAD_SCHEMA,
    delete_file,
    get_file,
    get_file_content,
    list_files,
    upload_file,
)
from services.gateway.batch.together import TOGETHER_SCHEMA, create_chat_completions

# Of the generating endpoints those that a batch may ask, if they are there.
BATCHABLE = ("/v1/completions", "/v1/chat/completions", "/v1/responses")

_AFTER = {"name": "after", "in": "query", "schema": {"type": "string"}}
_ORDER = {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}}
_PURPOSE = {"name": "purpose", "in": "query", "schema": {"type": "string"}}


def add_routes(api: FastAPI) -> None:
    """All of them, with their documentation."""
    for path, endpoint, kind, schema in (
        ("/v1/files", upload_file, "multipart/form-data", UPLOAD_SCHEMA),
        ("/v1/batches", create_batch, "application/json", BatchBody.model_json_schema()),
        ("/v1/chat/completions/batch", create_chat_completions, "application/json", TOGETHER_SCHEMA),
    ):
        body = {"content": {kind: {"schema": schema}}, "required": True}
        _add(api, "POST", path, endpoint, {"requestBody": body})
    _add(api, "GET", "/v1/files", list_files, {"parameters": [_AFTER, _limit(file_routes.MAX_PAGE), _ORDER, _PURPOSE]})
    _add(api, "GET", "/v1/files/{file_id}", get_file)
    _add(api, "GET", "/v1/files/{file_id}/content", get_file_content)
    _add(api, "DELETE", "/v1/files/{file_id}", delete_file)
    _add(api, "GET", "/v1/batches", list_batches, {"parameters": [_AFTER, _limit(batch_routes.MAX_PAGE)]})
    _add(api, "GET", "/v1/batches/{batch_id}", get_batch)
    _add(api, "POST", "/v1/batches/{batch_id}/cancel", cancel_batch)


def _limit(most: int) -> dict[str, Any]:
    return {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}}


def _add(api: FastAPI, method: str, path: str, endpoint: Any, described: dict[str, Any] | None = None) -> None:
    api.add_api_route(path, endpoint, methods=[method], response_model=None, openapi_extra=described)
