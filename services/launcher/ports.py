"""Finds TCP ports of this host for servers that listen later."""

import random
import socket

from services.common.errors import Unavailable

# Above the default ports of the services, and below the ephemeral ports of Linux (ip(7)): no outgoing connection gets
# one of them.
_PORTS = range(11_000, 16_384)


def free_ports(count: int = 1, preferred: int = 0) -> int:
    """Return the first of ``count`` consecutive ports of 127.0.0.1 on which nothing listens.

    It is ``preferred`` if that is not 0 and they are free. Otherwise no outgoing connection can take the ports before
    their servers listen.
    """
    first = preferred or _random(count)
    while not all(map(is_free, range(first, first + count))):
        first = _random(count)
    return first


def is_free(port: int) -> bool:
    """Return whether a server can listen on ``port`` of 127.0.0.1."""
    try:
        check_is_free(port)
    except Unavailable:
        return False
    return True


def check_is_free(port: int) -> None:
    """Raise ``Unavailable`` if a server cannot listen on ``port`` of 127.0.0.1."""
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except (OSError, OverflowError) as error:
        raise Unavailable(
            f"cannot listen on 127.0.0.1:{port} ({error}): stop what runs there, or choose another port with grpc_port="
        ) from error


def _random(count: int) -> int:
    return random.randrange(_PORTS.start, _PORTS.stop - count + 1)
