"""Reads files that are named by flags, and checks the permissions of secrets."""

import stat
from pathlib import Path

import structlog

from services.common.errors import InvalidRequest

log = structlog.get_logger(__name__)


def read_file(flag: str, path: str) -> bytes:
    """Return the content of the file that ``flag`` names. Raises ``InvalidRequest`` if it cannot be read."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(f"flag {flag}={path}: cannot be read ({error.strerror})", field=flag) from None


def warn_if_not_secret(flag: str, path: str) -> None:
    """Log a warning if every user of this host can read or write the secret in ``path``."""
    if stat.S_IMODE(Path(path).expanduser().stat().st_mode) & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("every user of this host can read or write a secret: run chmod o-rw on it", flag=flag, path=path)
