"""The document at ``/openapi.json``: FastAPI's, with the schemas of bodies and errors."""

import json
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.gateway.anthropic.errors import CREATE

_SCHEMAS = "#/components/schemas/"
_STRING = {"type": "string"}
_STRING_OR_NULL = {"type": ["string", "null"]}


def _object(properties: dict[str, Any], **rest: str) -> dict[str, Any]:
    """Return the schema of an object that always has all ``properties``."""
    return {**rest, "type": "object", "required": [*properties], "properties": properties}


_ERROR = _object(
    {"error": _object({"message": _STRING, "type": _STRING, "param": _STRING_OR_NULL, "code": _STRING_OR_NULL})},
    title="Error",
    description="The error of OpenAI's API.",
)
_ANTHROPIC_ERROR = _object(
    {
        "type": {"const": "error"},
        "error": _object(
            {
                "type": _STRING,
                "message": _STRING,
                "details": {"type": "object", "properties": {"error_code": _STRING}},
            }
        ),
        "request_id": _STRING,
    },
    title="AnthropicError",
    description="The error of Anthropic's API.",
)


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
    lifted: dict[str, Any] = json.loads(json.dumps(schema).replace("#/$defs/", f"{_SCHEMAS}{owner}."))
    schemas |= {f"{owner}.{name}": each for name, each in lifted.pop("$defs", {}).items()}
    return lifted
