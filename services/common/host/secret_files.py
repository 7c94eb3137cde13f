"""Files that flags name, and the secrets in some of them."""

import stat
from pathlib import Path

import structlog

from services.common.errors import InvalidRequest

log = structlog.get_logger(__name__)


def read_file(flag: str, path: str) -> bytes:
    """What is in the file that ``flag`` names. Raises ``InvalidRequest``."""
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise InvalidRequest(f"flag {flag}={path}: cannot be read ({error.strerror})", field=flag) from None


def warn_if_open(flag: str, path: str) -> None:
    """A secret that everybody on the host may read is none."""
    if stat.S_IMODE(Path(path).expanduser().stat().st_mode) & (stat.S_IROTH | stat.S_IWOTH):
        log.warning("a secret may be read or written by anybody on this host: chmod o-rw it", flag=flag, path=path)
