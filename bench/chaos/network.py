"""Who reaches whom: every service in a network namespace of its own, and a bridge for every pair that talks.

A bridge that is down forwards nothing and tells nobody: both ends go on to believe in a network, as in a real
partition. Where namespaces cannot be made all services are on loopback, and there are no partitions.
"""

import contextlib
import ipaddress
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

OUTSIDE = "client"  # this program, which is in no namespace of its own
PORTS = {"gateway": 10210, "scheduler": 10310, "worker": 10410}
_SUBNETS = ipaddress.ip_network("198.18.0.0/15")  # for benchmarks (RFC 2544)


class Link(NamedTuple):
    """Two that talk."""

    one: str
    other: str


class Network(Protocol):
    """Where services run and how they reach each other."""

    partitions: str  # "on", or why there are none
    ports: dict[str, int]  # by role

    def within(self, name: str) -> Sequence[str]:
        """What starts a program where ``name`` runs."""

    def host(self, name: str) -> str:
        """Where ``name`` listens."""

    def reach(self, name: str, seen_from: str) -> str:
        """The host of ``name`` for ``seen_from``."""

    def cut(self, link: Link) -> None:
        """Let nothing through any more."""

    def heal(self, link: Link) -> None:
        """Let everything through again."""


class Loopback:
    """An address for each service, and ports that systems do not give to clients: what was its own stays its own
    between two starts."""

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
        raise RuntimeError(f"{link.one} and {link.other} cannot be parted: {self.partitions}")

    heal = cut


class Namespaces:
    """Made by ``namespaces``, which also removes them."""

    partitions = "on"
    ports = PORTS

    def __init__(self, names: Sequence[str], links: Sequence[Link]) -> None:
        self._prefix = f"tk{os.getpid()}"
        self._names = [name for name in names if name != OUTSIDE]
        self._links = list(links)
        self._addresses: dict[tuple[str, str], str] = {}  # (whose, seen from)

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
        """Raises ``RuntimeError`` where that is not allowed."""
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
        """Whatever of it there is."""
        for link in self._links:
            # With an end goes its other one, which sockets that linger could keep for long.
            for device in (self._bridge(link), self._outlet(link, 0), self._outlet(link, 1)):
                with contextlib.suppress(RuntimeError):
                    _ip("link", "del", device)
        for name in self._names:
            with contextlib.suppress(RuntimeError):
                _ip("netns", "del", self._namespace(name))

    def _plug(self, link: Link, name: str, device: str, address: str) -> None:
        """A cable from the link's bridge to ``name``."""
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
        """The device at the bridge that leads to one of the two."""
        return f"{self._prefix}{'ab'[end]}{self._links.index(link)}"

    def _bridge(self, link: Link) -> str:
        return f"{self._prefix}br{self._links.index(link)}"


@contextlib.contextmanager
def network(names: Sequence[str], links: Sequence[Link], netns: str) -> Iterator[Network]:
    """``netns``: T = namespaces or ``RuntimeError``, F = loopback, auto = namespaces where they can be made."""
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
    """Why there are no namespaces; None = try."""
    if netns == "F":
        return "netns=F"
    if os.geteuid() != 0:
        return "network namespaces are root's"
    if shutil.which("ip") is None:
        return "there is no ip command (Debian's iproute2)"
    return None


def _ip(*arguments: str) -> None:
    done = subprocess.run(("ip", *arguments), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
