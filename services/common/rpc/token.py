"""The secret by which a scheduler knows its gateways: one line in a file that both have."""

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
    """Owned by an access or a dialer; any thread may call."""

    def __init__(self, path: str) -> None:
        """Raises ``InvalidRequest`` for a file without a token."""
        self._path = path
        self._lock = threading.Lock()
        self._file_watch = FileWatch([Path(path).expanduser()])
        self._token = _read(path)
        warn_if_not_secret(FLAG, path)

    @classmethod
    def of(cls, path: str | None) -> "TokenFile | None":
        return None if path is None else cls(path)

    def current(self) -> str:
        """The token that the file holds now, or held before it became wrong, which is logged."""
        with self._lock:
            if self._file_watch.changed():
                try:
                    self._token = _read(self._path)
                except InvalidRequest as error:
                    log.error("the token stays as it was", reason=error.message)
            return self._token

    def matches(self, presented: str) -> bool:
        """Takes as long whether it does or not."""
        return hmac.compare_digest(presented.encode(), self.current().encode())


def make_token_file(path: Path) -> None:
    """A new file with a random token, that only this user may read."""
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
