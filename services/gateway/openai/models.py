"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Any

from fastapi import Request, Response

from services.common.errors import NotFound
from services.gateway.engine.codec import ModelFacts
from services.gateway.http.errors import response
from services.gateway.openai.gateway import Gateway


async def list_models(request: Request) -> Response:
    """List the models that schedulers serve. Wait until there is one."""
    gateway: Gateway = request.app.state.gateway
    return response(200, {"object": "list", "data": [_describe(facts) for facts in await gateway.fleet.list_models()]})


async def get_model(request: Request, model_id: str) -> Response:
    """Return a model by its id or an alias. Raises ``NotFound``."""
    gateway: Gateway = request.app.state.gateway
    facts = gateway.fleet.find_model(model_id)
    if facts is None:
        raise NotFound(f"the model {model_id[:200]!r} does not exist", field="model", reason="MODEL_NOT_FOUND")
    return response(200, _describe(facts))


def _describe(facts: ModelFacts) -> dict[str, Any]:
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
