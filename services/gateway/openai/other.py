"""``/version``, and the error of ``/v1/embeddings``."""

from functools import cache
from importlib.metadata import version

from fastapi import Request, Response

from services.common.errors import NotFound
from services.gateway.http.errors import response
from services.gateway.openai.router import Router

router = Router()


@router.get("/version")
async def get_version(request: Request) -> Response:
    """Return the version of this server."""
    return response(200, {"version": server_version()})


@router.post("/v1/embeddings")
async def create_embedding(request: Request) -> Response:
    """Return 404: this server makes no embeddings."""
    raise NotFound(
        "this server generates text and makes no embeddings: ask one that serves an embedding model",
        reason="UNKNOWN_URL",
    )


@cache
def server_version() -> str:
    """Return the version of this server."""
    return version("tokasaurus")
