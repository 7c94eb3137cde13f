"""Passes a listening socket and a private directory from ``toka`` to each of its gateways, in the environment.

Several gateways share a port. Each has its own queue of connections, and the kernel distributes new connections evenly
(SO_REUSEPORT). ``toka`` holds all of these sockets, so connections in the queue of a gateway that crashed are served by
its successor. Meanwhile, new connections go to the other gateways.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.boundaries import undo_on_error
from services.common.errors import Unavailable
from services.common.host.reuseport import select_listeners

BACKLOG = 65_535  # connections in a queue; the kernel limits it to net.core.somaxconn
_VARIABLE = "TOKA_HANDOVER"


def listen(
    host: str, port: int, count: int = 1, *, joins: bool = False, flags: tuple[str, str] = ("host", "port")
) -> list[socket.socket]:
    """Return ``count`` TCP sockets that listen on one port. Port 0 stands for any free port.

    With ``joins``, the sockets share the port with other processes of this user. ``flags`` names the flags of the
    address in the error message. Raises ``Unavailable`` if the port cannot be opened.
    """
    listeners: list[socket.socket] = []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if count > 1:
            with _bound(family, address, shared=False) as exclusive:  # fails if another process shares the port
                address = exclusive.getsockname()
        for _ in range(count):
            listeners.append(_bound(family, address, shared=joins or count > 1))
            listeners[-1].listen(BACKLOG)
    except (OSError, OverflowError) as error:
        for listener in listeners:
            listener.close()
        raise Unavailable(
            f"cannot listen on {host}:{port} ({error}): stop what runs there, or choose another with"
            f" {flags[0]}= or {flags[1]}="
        ) from error
    return listeners


def _bound(family: socket.AddressFamily, address: tuple[Any, ...], *, shared: bool) -> socket.socket:
    # asyncio sets TCP_NODELAY only for this protocol. Without it, a response in two writes takes 40 ms more.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    with undo_on_error(bound.close):
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    return bound


@dataclass(frozen=True)
class Handover:
    """Settings that the launcher passes to one gateway."""

    directory: str  # private to the deployment
    index: int  # of this gateway, from 0
    count: int  # number of gateways
    listener: int = -1  # file descriptor; -1 before it is opened

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables of the gateway."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Handover | None":
        """Return the handover in ``environment``, or None for a gateway that ``toka`` did not start."""
        text = environment.get(_VARIABLE)
        return None if text is None else cls(**json.loads(text))

    @property
    def name(self) -> str:
        """The name of this gateway among the deployment's children."""
        return "gateway" if self.count == 1 else f"gateway-{self.index}"

    @property
    def own_socket(self) -> Path:
        """The path of a Unix socket on which only this gateway answers."""
        return Path(self.directory, f"gateway-{self.index}.sock")

    def leave(self, listener: socket.socket) -> bool:
        """Stop new connections to this gateway's queue. Called when the gateway stops, and after it crashed.

        ``listener`` is the socket of any gateway. Returns whether another gateway gets the connections.
        """
        if self.count == 1:
            return False
        self._away(self.index).touch()
        return self._spread(listener)

    def join(self, listener: socket.socket) -> None:
        """Undo the ``leave`` of this gateway's predecessor."""
        if self.count > 1:
            self._away(self.index).unlink(missing_ok=True)
            self._spread(listener)

    def _away(self, index: int) -> Path:
        """Return the path of a file that exists while gateway ``index`` takes no connections."""
        return Path(self.directory, f"gateway-{index}.away")

    def _spread(self, listener: socket.socket) -> bool:
        """Select the sockets of the gateways that take connections. Return whether some gateways are excluded.

        Several processes may do this at the same time. Each repeats it until the set of gateways no longer changes, so
        the last process applies the changes of all others.
        """

        def present() -> list[int]:
            return [index for index in range(self.count) if not self._away(index).exists()]

        while True:
            some = 0 < len(found := present()) < self.count
            done = select_listeners(listener, found if some else None)
            if present() == found:
                return done and some

    @property
    def counter_files(self) -> list[Path]:
        """The paths of the gateways' shared counters, by gateway index. Empty if there is one gateway."""
        return [Path(self.directory, f"gateway-{index}.numbers") for index in range(self.count) if self.count > 1]
