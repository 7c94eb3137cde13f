"""The network of the services: a network namespace for each service, and a bridge for each link.

A bridge that is down drops all packets without an error at either end, as in a real partition. If namespaces cannot be
made, all services use loopback, and there are no partitions.
"""

import contextlib
import ipaddress
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

OUTSIDE = "client"  # this program, which is in the namespace of the host
PORTS = {"gateway": 10210, "scheduler": 10310, "worker": 10410}
_SUBNETS = ipaddress.ip_network("198.18.0.0/15")  # for benchmarks (RFC 2544)


class Link(NamedTuple):
    """Two services that are connected."""

    one: str
    other: str


class Network(Protocol):
    """The hosts of services, and the connections between them."""

    partitions: str  # "on", or the reason why there are none
    ports: dict[str, int]  # by role

    def within(self, name: str) -> Sequence[str]:
        """Return the command prefix that starts a program at the service ``name``."""

    def host(self, name: str) -> str:
        """Return the address on which ``name`` listens."""

    def reach(self, name: str, seen_from: str) -> str:
        """Return the address at which ``seen_from`` reaches ``name``."""

    def cut(self, link: Link) -> None:
        """Begin to drop all packets of ``link``."""

    def heal(self, link: Link) -> None:
        """Forward the packets of ``link`` again."""


class Loopback:
    """A network on loopback, with an address for each service.

    Ports are outside the range for outgoing connections, so that a port stays free while its service restarts.
    """

    def __init__(self, names: Sequence[str], reason: str) -> None:
        self.partitions = f"skipped: {reason}"
        pid = os.getpid()
        self.ports = dict(zip(PORTS, itertools.count(12_000 + pid % 6_000 * len(PORTS)), strict=False))
        self._hosts = {name: f"127.{64 + pid // 256 % 64}.{pid % 256}.{n}" for n, name in enumerate(names, start=1)}

    def within(self, name: str) -> Sequence[str]:
        return ()

    def host(self, name: str) -> str:
        return self._hosts[name]

    def reach(self, name: str, seen_from: str) -> str:
        return self._hosts[name]

    def cut(self, link: Link) -> None:
        raise RuntimeError(f"{link.one} and {link.other} cannot be disconnected: {self.partitions}")

    heal = cut


class Namespaces:
    """A network of namespaces and bridges."""

    partitions = "on"
    ports = PORTS

    def __init__(self, names: Sequence[str], links: Sequence[Link]) -> None:
        self._prefix = f"tk{os.getpid()}"
        self._names = [name for name in names if name != OUTSIDE]
        self._links = list(links)
        self._addresses: dict[tuple[str, str], str] = {}  # (service, seen from)

    def within(self, name: str) -> Sequence[str]:
        return ("ip", "netns", "exec", self._namespace(name))

    def host(self, name: str) -> str:
        return "0.0.0.0"

    def reach(self, name: str, seen_from: str) -> str:
        return self._addresses[name, seen_from]

    def cut(self, link: Link) -> None:
        _ip("link", "set", self._bridge(link), "down")

    def heal(self, link: Link) -> None:
        _ip("link", "set", self._bridge(link), "up")

    def make(self) -> None:
        """Create the namespaces and bridges. Raises ``RuntimeError`` if that is not permitted."""
        for name in self._names:
            _ip("netns", "add", self._namespace(name))
            _ip("-n", self._namespace(name), "link", "set", "lo", "up")
        first = int(_SUBNETS.network_address) + (os.getpid() * 64 % 32768) * 4
        for index, link in enumerate(self._links):
            _ip("link", "add", self._bridge(link), "type", "bridge")
            _ip("link", "set", self._bridge(link), "up")
            for end, name in enumerate(link):
                address = str(ipaddress.ip_address(first + 4 * index + 1 + end))
                self._addresses[name, link[1 - end]] = address
                self._plug(link, name, self._outlet(link, end), address)

    def remove(self) -> None:
        """Remove the namespaces and bridges that exist."""
        for link in self._links:
            # With an end goes its other one, which sockets that linger could keep for long.
            for device in (self._bridge(link), self._outlet(link, 0), self._outlet(link, 1)):
                with contextlib.suppress(RuntimeError):
                    _ip("link", "del", device)
        for name in self._names:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "del", self._namespace(name))

    def _plug(self, link: Link, name: str, device: str, address: str) -> None:
        """Connect ``name`` to the bridge of ``link``."""
        inner = f"{self._prefix}i{self._links.index(link)}"
        if name == OUTSIDE:
            where: tuple[str, ...] = ()
            _ip("link", "add", device, "type", "veth", "peer", "name", inner)
        else:
            where = ("-n", self._namespace(name))
            _ip("link", "add", device, "type", "veth", "peer", "name", inner, "netns", self._namespace(name))
        _ip("link", "set", device, "master", self._bridge(link))
        _ip("link", "set", device, "up")
        _ip(*where, "addr", "add", f"{address}/30", "dev", inner)
        _ip(*where, "link", "set", inner, "up")

    def _namespace(self, name: str) -> str:
        return f"{self._prefix}-{name}"

    def _outlet(self, link: Link, end: int) -> str:
        """Return the device at the bridge for one of the two ends."""
        return f"{self._prefix}{'ab'[end]}{self._links.index(link)}"

    def _bridge(self, link: Link) -> str:
        return f"{self._prefix}br{self._links.index(link)}"


@contextlib.contextmanager
def network(names: Sequence[str], links: Sequence[Link], netns: str) -> Iterator[Network]:
    """Yield the network. ``netns``: T = namespaces or ``RuntimeError``, F = loopback, auto = namespaces if possible."""
    if (reason := _obstacle(netns)) is None:
        made = Namespaces(names, links)
        try:
            try:
                made.make()
            except RuntimeError as error:
                if netns == "T":
                    raise
                reason = str(error)
            else:
                yield made
                return
        finally:
            made.remove()
    if netns == "T":
        raise RuntimeError(f"flag netns=T: {reason}")
    yield Loopback(names, reason)


def _obstacle(netns: str) -> str | None:
    """Return the reason why namespaces cannot be used, or None."""
    if netns == "F":
        return "netns=F"
    if os.geteuid() != 0:
        return "network namespaces require root"
    if shutil.which("ip") is None:
        return "there is no ip command (Debian's iproute2)"
    return None


def _ip(*arguments: str) -> None:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
