"""Channel and server options shared by every process, each with the failure it prevents."""

MIB = 1024 * 1024

# Between our own services; public servers pass their own receive limit.
MAX_MESSAGE_BYTES = 64 * MIB
MAX_PUBLIC_MESSAGE_BYTES = 16 * MIB

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A dead peer shows within 40 s even when nothing is sent.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Come back quickly after a restart.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


def server_options(max_receive_bytes: int) -> list[tuple[str, int]]:
    """Options of a server that takes messages of at most ``max_receive_bytes``."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Two servers on one port would share it silently.
        ("grpc.so_reuseport", 0),
        # Clients ping every 30 s while a long answer is silent; the default counts that as abuse and sends GOAWAY.
        # (With `recv` in its name the option is ignored.)
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # A burst of thousands of new streams is refused as bare CANCELLED by default.
        ("grpc.server.max_pending_requests", 65_536),
        ("grpc.server.max_pending_requests_hard_limit", 131_072),
    ]
