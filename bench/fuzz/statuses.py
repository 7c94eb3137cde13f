"""Statuses over gRPC that our servers must not return."""

import grpc

NEVER = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
# gRPC's asyncio client reports this instead of the server's status if a stream ends during a write.
_CLIENTS_OWN = "Internal error from Core"


def is_ours(details: str | None) -> bool:
    """Return whether the client itself made the status, because that of the server was lost."""
    return details == _CLIENTS_OWN
