"""Storage of what a client gets in any case."""

import asyncio
from collections.abc import Awaitable

import structlog

from services.common.boundaries import errors_logged
from services.common.errors import AlreadyExists, NotFound, TokaError, UnsupportedParameter
from services.gateway.openai.gateway import Gateway
from services.gateway.store.service import OpenStore

log = structlog.get_logger(__name__)

_TIMEOUT_S = 10.0  # the client waits during this time


async def try_to_store(kind: str, object_id: str, storing: Awaitable[None]) -> bool:
    """Await ``storing``, and return whether the object is stored. Errors are only logged.

    An object with the same id was stored by an earlier try of the same request.
    """
    failed = f"{kind} not stored"
    with errors_logged(log, failed, id=object_id):
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await storing
            return True
        except AlreadyExists:
            return True
        except (TokaError, TimeoutError) as error:
            log.warning(failed, id=object_id, reason=str(error) or f"took {_TIMEOUT_S:.0f} s")
    return False


async def opened_for(gateway: Gateway, field: str) -> OpenStore:
    """Return the store for the parameter ``field``. Raises InvalidRequest if there is none, and errors of the store."""
    try:
        return await gateway.store.opened()
    except NotFound as error:  # the gateway was started without a store
        raise UnsupportedParameter.at(field, error.message) from None
