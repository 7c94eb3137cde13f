"""Checks the health of servers: ``python -m services.common.rpc.probe ADDRESS ...``.

Exits with 0 if all of them are SERVING. It is for containers, and reads the certificates' flags from the environment.
"""

import os
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.config import GrpcFlags
from services.common.errors import TokaError
from services.common.flags import FlagError, load
from services.common.rpc.channel import PLAIN, Dialer

TIMEOUT_S = 3.0


def probe(address: str, dialer: Dialer = PLAIN) -> str:
    """Return the overall status of the server at ``address`` as named by grpc.health.v1, or the error of the call."""
    with dialer.open(address) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)  # the type stub lacks the methods
            response = stub.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


if __name__ == "__main__":
    try:
        dialer = Dialer.of(load(GrpcFlags, [], os.environ))
        states = [probe(address, dialer) for address in sys.argv[1:]]
    except (FlagError, TokaError) as error:
        states = [str(error)]
    print(*states, sep="\n")
    sys.exit(set(states) != {"SERVING"})
