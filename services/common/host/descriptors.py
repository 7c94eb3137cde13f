"""Limits of this process's file descriptors, and the share of them that connections may use.

The kernel gives a new file the lowest free number. So the number of a new descriptor is a lower bound on the number of
descriptors in use, and a caller needs no count to detect that the reserve has been reached.
"""

import os
import resource

MOST = 1_048_576  # used if there is no limit
_LEAST_RESERVE, _MOST_RESERVE = 16, 512
_RESERVED_SHARE = 16  # the reserve is the limit divided by this
_OWN_FILES = 64  # open in a service before its first connection


def raise_limit() -> int:
    """Raise the soft limit of open files to the hard limit if the system allows it. Return the resulting limit.

    Child processes inherit the limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS refuses more than kern.maxfilesperproc
            hard = soft
    return MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)


def current_limit() -> int:
    """Return the number of files that this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)


def reserve_of(limit: int) -> int:
    """Return the number of descriptors that client connections must leave to files, the store and other links."""
    return min(max(limit // _RESERVED_SHARE, _LEAST_RESERVE), _MOST_RESERVE)


def connections_within(limit: int, most: int) -> int:
    """Return the number of connections that a service with ``limit`` descriptors can hold: 1 to ``most``.

    A second reserve is left for connections that are being refused. They stay open for a moment.
    """
    return max(1, min(most, limit - 2 * reserve_of(limit) - min(_OWN_FILES, limit // 2)))


def next_number(descriptor: int) -> int:
    """Return the number that the next file will get, found by duplicating ``descriptor``. Raises ``OSError``."""
    found = os.dup(descriptor)
    os.close(found)
    return found
