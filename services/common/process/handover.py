"""What ``toka`` hands to each of its gateways, in the environment: a socket that listens, and a place for what is the
gateway's own.

Several gateways share a port, each with a queue of connections of its own, among which the kernel spreads those who
connect evenly (SO_REUSEPORT). ``toka`` holds all of these sockets, so who is in the queue of a gateway that died waits
for the next; and who connects meanwhile gets to another one.
"""

import json
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.common.errors import Unavailable
from services.common.host.reuseport import select_listeners

BACKLOG = 65_535  # connections in a queue; the kernel makes it net.core.somaxconn if that is less
_VARIABLE = "TOKA_HANDOVER"


def listen(
    host: str, port: int, count: int = 1, *, joins: bool = False, flags: tuple[str, str] = ("host", "port")
) -> list[socket.socket]:
    """``count`` TCP sockets that listen on one port (0: any that is free), or one that ``joins`` those of this user's
    other processes there. ``flags``: where they come from. Raises ``Unavailable``."""
    listeners: list[socket.socket] = []
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        if count > 1:
            with _bound(family, address, shared=False) as alone:  # nobody else may share the port
                address = alone.getsockname()
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
    # asyncio sets TCP_NODELAY for no other protocol, and without it an answer in two writes takes 40 ms longer.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


@dataclass(frozen=True)
class Handover:
    """One gateway's part. The launcher makes it, the gateway reads it."""

    directory: str  # private to the deployment
    index: int  # of this gateway
    count: int  # of all
    listener: int = -1  # file descriptor; -1 = not open yet

    @property
    def environment(self) -> dict[str, str]:
        """As the gateway gets it."""
        return {_VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Handover | None":
        """What ``environment`` holds; None for a gateway that was started by itself."""
        text = environment.get(_VARIABLE)
        return None if text is None else cls(**json.loads(text))

    @property
    def name(self) -> str:
        """Of this gateway among the deployment's children."""
        return "gateway" if self.count == 1 else f"gateway-{self.index}"

    @property
    def own_socket(self) -> Path:
        """A unix socket on which this gateway alone answers."""
        return Path(self.directory, f"gateway-{self.index}.sock")

    def leave(self, listener: socket.socket) -> bool:
        """From now on new connections get to other gateways: whether there are any. ``listener``: that of any gateway.
        Called when this one is going, and when it has died."""
        if self.count == 1:
            return False
        self._away(self.index).touch()
        return self._spread(listener)

    def join(self, listener: socket.socket) -> None:
        """Undo what ``leave`` did for the gateway before."""
        if self.count > 1:
            self._away(self.index).unlink(missing_ok=True)
            self._spread(listener)

    def _away(self, index: int) -> Path:
        """It exists while that gateway takes no connections."""
        return Path(self.directory, f"gateway-{index}.away")

    def _spread(self, listener: socket.socket) -> bool:
        """Several processes may do this at the same time: who does it last sees what all others have done."""

        def there() -> list[int]:
            return [index for index in range(self.count) if not self._away(index).exists()]

        while True:
            some = 0 < len(found := there()) < self.count
            done = spread(listener, found if some else None)
            if there() == found:
                return done and some

    @property
    def numbers(self) -> list[Path]:
        """The files that the gateways count in, by their index. There are none for a gateway alone."""
        return [Path(self.directory, f"gateway-{index}.numbers") for index in range(self.count) if self.count > 1]
