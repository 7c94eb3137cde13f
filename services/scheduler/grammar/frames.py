"""How a scheduler and the process that proves its grammars speak over a pipe: a length, then so many bytes of UTF-8."""

import struct

LENGTH = struct.Struct("<I")


def frame(text: str) -> bytes:
    data = text.encode()
    return LENGTH.pack(len(data)) + data
