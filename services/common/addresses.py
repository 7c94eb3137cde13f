"""Who may reach a server, by the address that it listens on."""

import contextlib
import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only processes of this host reach it."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_public(address: str) -> bool:
    """Whether others than this host may reach a gRPC server that listens on ``address``, host:port or unix:path."""
    return not address.startswith("unix:") and not is_loopback(address.rpartition(":")[0].strip("[]"))
