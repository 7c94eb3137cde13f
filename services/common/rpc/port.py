"""How a server takes an address, and who may connect to it there."""

import os

import grpc
import grpc.aio

from services.common.errors import Unavailable
from services.common.rpc.certificates import Certificates

_UNIX = "unix:"


def bind(server: grpc.Server | grpc.aio.Server, address: str, certificates: Certificates | None) -> str:
    """Have ``server``, not started yet, listen on ``address`` (``host:port``, port 0 = any free one, or ``unix:path``);
    returns the real one. TLS with ``certificates`` that serve; a unix socket is for processes of this user, instead.

    Raises ``Unavailable`` when the address cannot be bound.
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
