"""``GET /v1/models`` and ``GET /v1/models/{id}`` in the shape that the client expects."""

from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from services.common.errors import NotFound
from services.gateway.anthropic.errors import REQUEST_ID_HEADER, is_anthropic
from services.gateway.engine.codec import ModelFacts
from services.gateway.http.errors import response
from services.gateway.http.request import name_request
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.router import Router

router = Router()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List all served models. The shape is Anthropic's if the request has the header anthropic-version."""
    gateway: Gateway = request.app.state.gateway
    served = [_describe(request, facts) for facts in await gateway.fleet.list_models()]
    if not is_anthropic(request.scope):
        return response(200, {"object": "list", "data": served})
    page = {"data": served, "has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
    return response(200, page, _headers(request))


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """Return a model. The shape is Anthropic's if the request has the header anthropic-version."""
    gateway: Gateway = request.app.state.gateway
    if (facts := gateway.fleet.find_model(model_id)) is None:
        raise NotFound(f"the model {model_id[:200]!r} does not exist", field="model", reason="MODEL_NOT_FOUND")
    return response(200, _describe(request, facts), _headers(request))


def _describe(request: Request, facts: ModelFacts) -> dict[str, Any]:
    if is_anthropic(request.scope):
        return {
            "type": "model",
            "id": facts.id,
            "display_name": facts.id,
            "created_at": datetime.fromtimestamp(facts.created_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": facts.max_context_tokens,
            "max_tokens": facts.max_context_tokens,
        }
    return {
        "id": facts.id,
        "object": "model",
        "created": facts.created_unix_s,
        "owned_by": "tokasaurus",
        "max_model_len": facts.max_context_tokens,
        "root": facts.root or facts.id,
        "parent": None,
        "aliases": list(facts.aliases),
    }


def _headers(request: Request) -> dict[str, str]:
    return {REQUEST_ID_HEADER: name_request(request.scope)} if is_anthropic(request.scope) else {}
