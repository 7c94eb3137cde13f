"""Selects the sockets of a SO_REUSEPORT group that get new connections."""

import ctypes
import socket
import struct
import sys
from collections.abc import Sequence

# linux/asm-generic/socket.h
_ATTACH_PROGRAM = 51
_DETACH_PROGRAM = 68
# Opcodes of classic BPF (linux/filter.h). The program returns the index of a socket. The kernel numbers the sockets of
# a port in the order in which they began to listen.
_LOAD, _MODULO, _SKIP_UNLESS, _RETURN = 0x20, 0x94, 0x15, 0x06
_RANDOM = 0xFFFFF000 + 56  # the load address that yields a random number


def select_listeners(listener: socket.socket, indices: Sequence[int] | None) -> bool:
    """Distribute new connections evenly over some of the sockets that listen on the port of ``listener``.

    ``indices`` are the positions of these sockets in the order in which they began to listen, from 0. None selects all
    sockets. Connections that are already queued stay at their socket. Returns False if the kernel cannot do this.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        if indices is None:
            listener.setsockopt(socket.SOL_SOCKET, _DETACH_PROGRAM, 0)
        else:
            program = ctypes.create_string_buffer(code := _program(indices))
            header = struct.pack("HP", len(code) // 8, ctypes.addressof(program))
            listener.setsockopt(socket.SOL_SOCKET, _ATTACH_PROGRAM, header)
    except FileNotFoundError:  # there was no program to detach: all sockets get connections already
        return True
    except OSError:
        return False
    return True


def _program(indices: Sequence[int]) -> bytes:
    """Return the bytecode of a program that returns one of ``indices`` at random."""
    *others, last = indices
    steps = [(_LOAD, 0, 0, _RANDOM), (_MODULO, 0, 0, len(indices))]
    for drawn, number in enumerate(others):
        steps += [(_SKIP_UNLESS, 0, 1, drawn), (_RETURN, 0, 0, number)]
    steps.append((_RETURN, 0, 0, last))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
