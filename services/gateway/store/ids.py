"""New ids, and the current time."""

import secrets
import time


def new_id(prefix: str) -> str:
    """Return ``prefix`` with 128 random bits in hexadecimal."""
    return prefix + secrets.token_hex(16)


def now() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())
