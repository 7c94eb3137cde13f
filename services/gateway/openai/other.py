"""Small answers: the server's version, and why there are no embeddings."""

from functools import cache
from importlib.metadata import version

from fastapi import Request, Response

from services.common.errors import NotFound
from services.gateway.http.errors import response


async def get_version(request: Request) -> Response:
    """The version of this server."""
    return response(200, {"version": _version()})


async def create_embedding(request: Request) -> Response:
    """Always 404: this server makes no embeddings."""
    raise NotFound(
        "this server generates text and makes no embeddings: ask one that serves an embedding model",
        reason="UNKNOWN_URL",
    )


@cache
def _version() -> str:
    return version("tokasaurus")
