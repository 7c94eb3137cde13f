"""Statuses over gRPC that no server of ours may give."""

import grpc

NEVER = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL})
# gRPC's asyncio client has this in the place of the server's status where a stream ended while it was written to.
_CLIENTS_OWN = "Internal error from Core"


def is_ours(details: str | None) -> bool:
    """Whether the status is this program's own: the server's was lost."""
    return details == _CLIENTS_OWN
