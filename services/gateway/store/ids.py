"""Names of new things, and what time it is."""

import secrets
import time


def new_id(prefix: str) -> str:
    """``prefix`` and 128 random bits."""
    return prefix + secrets.token_hex(16)


def now() -> int:
    """Unix time in whole seconds."""
    return int(time.time())
