"""The document at ``/openapi.json``: FastAPI's, with the schemas of bodies and errors."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway.anthropic.errors import CREATE

_SCHEMAS = "#/components/schemas/"
_ERROR = {
    "title": "Error",
    "description": "The error of OpenAI's API.",
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANTHROPIC_ERROR = {
    "title": "AnthropicError",
    "description": "The error of Anthropic's API.",
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message", "details"],
            "properties": {
                "type": {"type": "string"},
                "message": {"type": "string"},
                "details": {"type": "object", "properties": {"error_code": {"type": "string"}}},
            },
        },
        "request_id": {"type": "string"},
    },
}


def describe(api: FastAPI) -> dict[str, Any]:
    """Return the document of ``api``. The first call makes it."""
    if api.openapi_schema is None:
        document = get_openapi(title=api.title, version=api.version, routes=api.routes)
        schemas = {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}
        operations = [(path, each) for path, methods in document["paths"].items() for each in methods.values()]
        for path, operation in operations:
            for content in operation.get("requestBody", {}).get("content", {}).values():
                content["schema"] = _lifted(content["schema"], schemas)
            # FastAPI documents 422. Here every error has the form of OpenAI or of Anthropic.
            operation["responses"].pop("422", None)
            error = "AnthropicError" if path.startswith(CREATE) else "Error"
            operation["responses"]["default"] = {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{error}"}}},
            }
        document["components"] = {"schemas": schemas}
        api.openapi_schema = document
    return api.openapi_schema


def _lifted(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Return ``schema`` without its definitions, and add them to ``schemas`` under names that no other body has.

    References are resolved in the whole document, where the ``#/$defs`` of a body do not exist.
    """
    owner = schema.get("title", "")

    def lift(part: Any) -> Any:
        if isinstance(part, list):
            return [lift(each) for each in part]
        if not isinstance(part, dict):
            return part
        lifted = {name: lift(value) for name, value in part.items() if name != "$defs"}
        if isinstance(lifted.get("$ref"), str):
            lifted["$ref"] = lifted["$ref"].replace("#/$defs/", f"{_SCHEMAS}{owner}.")
        return lifted

    schemas |= {f"{owner}.{name}": lift(each) for name, each in schema.get("$defs", {}).items()}
    lifted: dict[str, Any] = lift(schema)
    return lifted
