"""Among which of the sockets that share a port the kernel spreads new connections (SO_REUSEPORT)."""

import ctypes
import socket
import struct
import sys
from collections.abc import Sequence

# linux/asm-generic/socket.h
_ATTACH_PROGRAM = 51
_DETACH_PROGRAM = 68
# Classic BPF (linux/filter.h): a program that returns the number of a socket, by the order in which they began to
# listen.
_LOAD, _MODULO, _SKIP_UNLESS, _RETURN = 0x20, 0x94, 0x15, 0x06
_RANDOM = 0xFFFFF000 + 56  # "loads" a random number


def spread(listener: socket.socket, among: Sequence[int] | None) -> bool:
    """Have the kernel give new connections to those sockets only that were the ``among``-th (0: the first) to listen on
    the port of ``listener``, each its share; None: to all. Connections that wait stay where they are. Returns whether
    the kernel can do that."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        if among is None:
            listener.setsockopt(socket.SOL_SOCKET, _DETACH_PROGRAM, 0)
        else:
            program = ctypes.create_string_buffer(code := _choose(among))
            header = struct.pack("HP", len(code) // 8, ctypes.addressof(program))
            listener.setsockopt(socket.SOL_SOCKET, _ATTACH_PROGRAM, header)
    except FileNotFoundError:  # there was no program: all get some
        return True
    except OSError:
        return False
    return True


def _choose(among: Sequence[int]) -> bytes:
    """The program that returns one of ``among`` at random."""
    *others, last = among
    steps = [(_LOAD, 0, 0, _RANDOM), (_MODULO, 0, 0, len(among))]
    for drawn, number in enumerate(others):
        steps += [(_SKIP_UNLESS, 0, 1, drawn), (_RETURN, 0, 0, number)]
    steps.append((_RETURN, 0, 0, last))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
