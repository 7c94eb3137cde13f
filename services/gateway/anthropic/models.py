"""``GET /v1/models`` and ``GET /v1/models/{id}`` in the shape that the client expects."""

from datetime import UTC, datetime
from typing import Any

from fastapi import Request, Response

from services.common.errors import NotFound
from services.gateway.anthropic.errors import REQUEST_ID_HEADER, is_anthropic
from services.gateway.engine.codec import ModelFacts
from services.gateway.http.errors import response
from services.gateway.http.request import name_request
from services.gateway.openai import models
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.router import Router

router = Router()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """List all served models. The shape is Anthropic's if the request has the header anthropic-version."""
    if not is_anthropic(request.scope):
        return await models.list_models(request)
    gateway: Gateway = request.app.state.gateway
    served = [_describe(facts) for facts in await gateway.fleet.list_models()]
    page = {"data": served, "has_more": False, "first_id": served[0]["id"], "last_id": served[-1]["id"]}
    return _response(request, page)


@router.get("/v1/models/{model_id:path}")
async def get_model(request: Request, model_id: str) -> Response:
    """Return a model. The shape is Anthropic's if the request has the header anthropic-version."""
    if not is_anthropic(request.scope):
        return await models.get_model(request, model_id)
    gateway: Gateway = request.app.state.gateway
    if (facts := gateway.fleet.find_model(model_id)) is None:
        raise NotFound(f"the model {model_id[:200]!r} does not exist", field="model", reason="MODEL_NOT_FOUND")
    return _response(request, _describe(facts))


def _describe(facts: ModelFacts) -> dict[str, Any]:
    return {
        "type": "model",
        "id": facts.id,
        "display_name": facts.id,
        "created_at": datetime.fromtimestamp(facts.created_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": facts.max_context_tokens,
        "max_tokens": facts.max_context_tokens,
    }


def _response(request: Request, content: dict[str, Any]) -> Response:
    return response(200, content, {REQUEST_ID_HEADER: name_request(request.scope)})
