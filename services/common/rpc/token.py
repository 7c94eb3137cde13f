"""The secret with which gateways authenticate at schedulers: a line in a file that both can read."""

import hmac
import os
import secrets
import threading
from pathlib import Path

import structlog

from services.common.errors import InvalidRequest
from services.common.host.file_watch import FileWatch
from services.common.host.secret_files import read_file, warn_if_not_secret

log = structlog.get_logger(__name__)

FLAG = "grpc_token_file"
_SHORTEST = 16
_BYTES = 32


class TokenFile:
    """Current token in a file, read again when the file changes. Any thread may call."""

    def __init__(self, path: str) -> None:
        """Read the file. Raises ``InvalidRequest`` if it contains no token."""
        self._path = path
        self._lock = threading.Lock()
        self._file_watch = FileWatch([Path(path).expanduser()])
        self._token = _read(path)
        warn_if_not_secret(FLAG, path)

    @classmethod
    def of(cls, path: str | None) -> "TokenFile | None":
        return None if path is None else cls(path)

    def current(self) -> str:
        """Return the token in the file. If a changed file is invalid, log it and return the previous token."""
        with self._lock:
            if self._file_watch.changed():
                try:
                    self._token = _read(self._path)
                except InvalidRequest as error:
                    log.error("cannot reload the token: the previous one stays in use", reason=error.message)
            return self._token

    def matches(self, presented: str) -> bool:
        """Compare ``presented`` with the token in constant time."""
        return hmac.compare_digest(presented.encode(), self.current().encode())


def make_token_file(path: Path) -> None:
    """Create a file with a random token that only this user can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secrets.token_urlsafe(_BYTES) + "\n")


def _read(path: str) -> str:
    token = read_file(FLAG, path).decode(errors="replace").strip()
    if len(token) < _SHORTEST or not (token.isascii() and token.isprintable() and " " not in token):
        raise InvalidRequest(
            f"flag {FLAG}={path}: expected one word of {_SHORTEST} or more ASCII characters, such as `openssl rand -hex"
            " 32` prints",
            field=FLAG,
        )
    return token
