"""Classifies listen addresses by the hosts that can connect to them."""

import contextlib
import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether only processes of this host can connect to ``host``."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_public(address: str) -> bool:
    """Return whether other hosts may connect to a gRPC server at ``address``, host:port or unix:path."""
    return not address.startswith("unix:") and not is_loopback(address.rpartition(":")[0].strip("[]"))
