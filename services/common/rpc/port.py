"""Binds gRPC servers to addresses and restricts the processes that may connect."""

import os

import grpc
import grpc.aio

from services.common.errors import Unavailable
from services.common.rpc.certificates import Certificates

_UNIX = "unix:"


def bind(server: grpc.Server | grpc.aio.Server, address: str, certificates: Certificates | None) -> str:
    """Bind ``server``, which has not started, to ``address``. Return the actual address.

    ``address`` is ``host:port`` or ``unix:path``. Port 0 is any free port. TLS is used if ``certificates`` contain a
    server certificate. A Unix socket has no TLS, but only processes of this user can connect. Raises ``Unavailable`` if
    the address cannot be bound.
    """
    try:
        if address.startswith(_UNIX):
            server.add_insecure_port(address)
            os.chmod(address.removeprefix(_UNIX), 0o600)
            return address
        if certificates is not None and certificates.serves:
            port = server.add_secure_port(address, certificates.of_server())
        else:
            port = server.add_insecure_port(address)
    except (RuntimeError, OSError) as error:
        raise Unavailable(f"cannot listen on {address}: {error}; choose a free address") from error
    return f"{address.rpartition(':')[0]}:{port}"
