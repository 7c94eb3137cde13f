"""A rank without a model: it meets the others, serves, and ends when one of them does. For ``test_supervisor``."""

import os
import select
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from services.common.errors import PEER_LOST_STATUS


def meet(path: str, rank: int, size: int) -> list[socket.socket]:
    """The first's connections to all others, and theirs to the first."""
    if rank == 0:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{path}.{os.getpid()}")
            os.rename(f"{path}.{os.getpid()}", path)  # in the place of the one before
            listening.listen()
            return [listening.accept()[0] for _ in range(size - 1)]
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            return [connection]
        except OSError:
            connection.close()
            time.sleep(0.02)


def main(address: str, meeting: str, rank: str, size: str, manner: str) -> None:
    """``manner``: "broken" = it cannot serve, says so, and ends late; "deaf" = it does not notice the others' end."""
    connections = meet(meeting, int(rank), int(size))
    if manner == "broken":
        print("there is no such model", file=sys.stderr, flush=True)
        for connection in connections:
            connection.shutdown(socket.SHUT_RDWR)
        time.sleep(0.5)
        sys.exit(1)
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
    server.add_insecure_port(address)
    server.start()
    if manner == "deaf":
        time.sleep(600)
    select.select(connections, [], [])
    os._exit(PEER_LOST_STATUS)


if __name__ == "__main__":
    main(*sys.argv[1:])
