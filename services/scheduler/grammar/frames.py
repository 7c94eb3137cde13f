"""Frames on the pipes between a scheduler and its grammar children: a length, then UTF-8 text of this length."""

import struct

LENGTH = struct.Struct("<I")


def frame(text: str) -> bytes:
    data = text.encode()
    return LENGTH.pack(len(data)) + data
