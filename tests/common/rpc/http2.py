"""Calls as raw HTTP/2 frames, for bytes that no gRPC client sends."""

import asyncio

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY = 0, 1, 3, 4, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Encode one header of HPACK as a literal that is not indexed."""
    assert len(name) < 127
    assert len(value) < 127
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value


async def call(address: str, path: bytes, **more: bytes) -> bytes:
    """Send one call with an empty message, on a connection of its own. Returns the bytes that come back until the
    stream or the connection ends."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    headers = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"test"}
    headers |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    headers |= {name.encode(): value for name, value in more.items()}
    block = b"".join(header(name, value) for name, value in headers.items())
    opening = _PREFACE + frame(_SETTINGS, 0, 0) + frame(_HEADERS, _END_HEADERS, 1, block)
    writer.write(opening + frame(_DATA, _END_STREAM, 1, b"\0" * 5))
    received = b""
    try:
        while True:
            head = await reader.readexactly(9)
            received += head + await reader.readexactly(int.from_bytes(head[:3]))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:])
            if kind == _SETTINGS and not flags & _ACK:
                writer.write(frame(_SETTINGS, _ACK, 0))
            if kind == _GOAWAY or (stream == 1 and (kind == _RST_STREAM or flags & _END_STREAM)):
                return received
    except (asyncio.IncompleteReadError, ConnectionError):
        return received
    finally:
        writer.close()
