"""HTTPS with certificates that may be replaced while the gateway runs."""

import ssl
from pathlib import Path

import structlog

from services.common.errors import InvalidRequest
from services.common.host.file_watch import FileWatch
from services.common.host.secret_files import warn_if_not_secret

log = structlog.get_logger(__name__)


class Certificate:
    """A certificate that is loaded again when its files change. Open connections are not affected."""

    def __init__(self, certificate: str, key: str) -> None:
        """Load the files. Raises ``InvalidRequest`` if they are invalid or do not match."""
        self._files = [Path(file).expanduser() for file in (certificate, key)]
        self._file_watch = FileWatch(self._files)
        self._current = self._load()
        self.context = self._load()  # given to the server
        self.context.sni_callback = self._choose
        warn_if_not_secret("http_key", key)

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Use the current certificate for a handshake. Load it again if its files have changed."""
        if self._file_watch.changed():
            try:
                self._current = self._load()
                log.info("certificate reloaded")
            except InvalidRequest as error:
                log.error("certificate not reloaded", reason=error.message)
        connection.context = self._current

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without this argument, OpenSSL would prompt for a password on the terminal.
            context.load_cert_chain(self._files[0], self._files[1], password="")
        except (OSError, ssl.SSLError) as error:
            raise InvalidRequest(
                f"flags http_cert={self._files[0]} http_key={self._files[1]}: {error}; expected a PEM file with"
                " certificates, the server's own first, and one with its key, without a password",
                field="http_cert",
            ) from None
        return context
