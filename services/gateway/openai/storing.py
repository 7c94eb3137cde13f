"""Store what a client gets in any case."""

import asyncio
from collections.abc import Awaitable

import structlog

from services.common.boundaries import errors_logged
from services.common.errors import AlreadyExists, TokaError

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
