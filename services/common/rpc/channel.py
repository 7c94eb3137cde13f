"""Options of channels and servers, each with the failure it prevents, and the ``Dialer`` that opens channels."""

import asyncio
from dataclasses import dataclass

import grpc
import grpc.aio

from services.common.config import GrpcFlags
from services.common.host.descriptors import connections_within, current_limit
from services.common.rpc.certificates import Certificates
from services.common.rpc.token import TokenFile

MIB = 1024 * 1024

# The limit between our own services. Public servers have a lower receive limit.
MAX_MESSAGE_BYTES = 64 * MIB
MAX_PUBLIC_MESSAGE_BYTES = 16 * MIB

HANDSHAKE_TIMEOUT_MS = 10_000
MOST_CONNECTIONS = 16_384  # per server
MOST_CALLS = 32_768  # concurrent calls of a server with an event loop
_MOST_STREAMS = 16_384  # per connection
_MOST_PENDING = 16_384

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Detects a lost peer within 40 s even while nothing is sent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Each channel has connections of its own. By default all channels to an address share one, so a new channel that
    # replaces one with a broken connection would get that connection back.
    ("grpc.use_local_subchannel_pool", 1),
    # Connect soon after the peer has started: it may be ready for requests as soon as it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name, this is the timeout of a connection attempt including handshakes.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


def server_options(max_receive_bytes: int) -> list[tuple[str, int]]:
    """Return the options of a server that receives messages of at most ``max_receive_bytes``.

    They limit the memory that clients without a key can make it use, as measured by ``bench.fuzz`` with
    ``surface=attacks``.
    """
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # With the default, a second server would silently share the port.
        ("grpc.so_reuseport", 0),
        # Clients ping every 30 s while a call sends nothing. By default that counts as abuse and gets GOAWAY.
        # (With `recv` in its name the option is ignored.)
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # By default, a client that connects and sends nothing keeps its connection for two minutes.
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # A connection beyond it is closed at once. Without a limit, connections would use all file descriptors.
        ("grpc.max_allowed_incoming_connections", connections_within(current_limit(), MOST_CONNECTIONS)),
        # A client queues further calls itself.
        ("grpc.max_concurrent_streams", _MOST_STREAMS),
        # By default, gRPC also counts streams that have ended for the client but are not yet freed in the server. It
        # refuses new streams then, so a client at the limit gets UNAVAILABLE instead of queueing its calls.
        ("grpc.http.overload_protection", 0),
        # Calls of all connections that have no handler yet. Streams that a client opens and resets at once
        # (CVE-2023-44487) accumulate here, at 14 KB each. At the default of 1,000 a burst is refused as bare CANCELLED.
        ("grpc.server.max_pending_requests", _MOST_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * _MOST_PENDING),
    ]


@dataclass(frozen=True)
class Dialer:
    """Opens the channels of a process with its certificates and token. Any thread may use it.

    Callers open a new channel for each connection attempt, so that it uses the current certificates and a new
    connection.
    """

    certificates: Certificates | None = None
    server_name: str | None = None
    token: TokenFile | None = None

    @classmethod
    def of(cls, config: GrpcFlags, token_file: str | None = None) -> "Dialer":
        """Return the dialer of ``config``. Raises ``InvalidRequest`` for files that cannot be used."""
        return cls(Certificates.of(config), config.grpc_server_name, TokenFile.of(token_file))

    def open(self, address: str) -> grpc.Channel:
        """Open a channel of the blocking API to ``address``. The caller closes it."""
        if (certificates := self._certificates_for(address)) is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, certificates.of_client(), options=self._options)

    def open_aio(self, address: str) -> grpc.aio.Channel:
        """Open a channel of the asyncio API to ``address``. The caller closes it."""
        if (certificates := self._certificates_for(address)) is None:
            return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.aio.secure_channel(address, certificates.of_client(), options=self._options)

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of a call that identifies its caller."""
        return () if self.token is None else (("authorization", f"Bearer {self.token.current()}"),)

    def _certificates_for(self, address: str) -> Certificates | None:
        """Return the certificates to use, or None without TLS."""
        if self.certificates is None or not self.certificates.verifies or address.startswith("unix:"):
            return None
        return self.certificates

    @property
    def _options(self) -> list[tuple[str, int | str]]:
        named = [] if self.server_name is None else [("grpc.ssl_target_name_override", self.server_name)]
        return [*CHANNEL_OPTIONS, *named]


PLAIN = Dialer()  # neither certificates nor token


def task_is_cancelled() -> bool:
    """Return whether the current task was cancelled.

    If not, a ``CancelledError`` comes from what the task awaits, such as a call on a channel that was closed.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
