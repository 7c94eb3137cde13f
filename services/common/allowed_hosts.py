"""Host names accepted by an HTTP port without keys, as a defence against DNS rebinding.

A web page may let its own name resolve to an address of the visitor's network. Browsers then treat the server at that
address as the page's own origin, and let the page read from it. But the page cannot change the ``Host`` header, which
contains the page's name.
"""

import ipaddress
import re
import socket
from collections.abc import Sequence

# RFC 6761, RFC 6762, RFC 8375, and ICANN's resolution 2024.07.29.06: no public DNS server resolves these.
_PRIVATE_DOMAINS = (".localhost", ".local", ".home.arpa", ".internal")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)(?:%[^\[\]]*)?\]|(?P<name>[a-z0-9._-]*))(?::[0-9]*)?")
_LISTED = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*\.?")


class AllowedHosts:
    """Set of accepted values of ``Host``.

    IP addresses, names without a dot and names in private domains are always accepted, since no web page of the public
    internet can have such a name. So are the name of this machine and the name that the port is bound to.
    """

    def __init__(self, bound: str, listed: Sequence[str] = ()) -> None:
        """Create the set for a port bound to the host ``bound``. ``listed`` is the flag ``allowed_hosts``."""
        self._any = "*" in listed
        self._names = {name.lower().rstrip(".") for name in (bound, socket.gethostname(), *listed)}
        below = (name[1:].rstrip(".") for name in map(str.lower, listed) if name.startswith("*."))
        self._domains = (*_PRIVATE_DOMAINS, *below)

    def allows(self, host: str) -> bool:
        """Return whether ``host``, the value of a ``Host`` header, is accepted.

        An empty value is; browsers never send it.
        """
        return self._any or self._allows(host.strip().lower())

    def _allows(self, host: str) -> bool:
        if (parts := _HOST.fullmatch(host)) is None:
            return False
        if (address := parts["v6"]) is not None:
            return _is_v6(address)
        name = parts["name"].rstrip(".")
        if "." not in name or name in self._names or name.endswith(self._domains):
            return True
        # The URL standard reads a host whose last label is a number as an IPv4 address, whatever the other labels are.
        return name.rpartition(".")[2].isdecimal()


def is_listable(name: str) -> bool:
    """Return whether ``name`` is valid in ``allowed_hosts``: a host name, ``*.`` and a domain, or ``*``."""
    return _LISTED.fullmatch(name.lower()) is not None


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
