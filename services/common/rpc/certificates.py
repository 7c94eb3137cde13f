"""Loads the certificates of a process's gRPC links from PEM files, again when they change."""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from services.common.config import GrpcFlags
from services.common.errors import InvalidRequest
from services.common.host.file_watch import FileWatch
from services.common.host.secret_files import read_file, warn_if_not_secret

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class PemFiles:
    """Contents of the files. None for a file that is not configured."""

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None


class Certificates:
    """Current certificates of a server or a dialer. Any thread may call, since gRPC's threads do the handshakes."""

    def __init__(self, config: GrpcFlags) -> None:
        """Read the files. Raises ``InvalidRequest`` if one cannot be used."""
        self._config = config
        self._lock = threading.Lock()
        files = filter(None, (config.grpc_cert, config.grpc_key, config.grpc_ca))
        self._file_watch = FileWatch(Path(file).expanduser() for file in files)
        self._pems = _read(config)
        if config.grpc_key is not None:
            warn_if_not_secret("grpc_key", config.grpc_key)

    @classmethod
    def of(cls, config: GrpcFlags) -> "Certificates | None":
        """Return the certificates of ``config``, or None if no files are configured."""
        return None if config.grpc_cert is None and config.grpc_ca is None else cls(config)

    def current(self) -> PemFiles:
        """Return the contents of the files. If a changed file is invalid, log it and return the previous contents."""
        with self._lock:
            if self._file_watch.changed():
                try:
                    self._pems = _read(self._config)
                    log.info("certificates reloaded")
                except InvalidRequest as error:
                    log.error("cannot reload the certificates: the previous ones stay in use", reason=error.message)
            return self._pems

    @property
    def serves(self) -> bool:
        """True if a server with these certificates uses TLS."""
        return self._config.grpc_cert is not None

    @property
    def verifies(self) -> bool:
        """True if a client with these certificates uses TLS, and a TLS server requires client certificates."""
        return self._config.grpc_ca is not None

    def of_client(self) -> grpc.ChannelCredentials:
        """Return credentials of one channel. Its later connections use the same certificates."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.authorities, pems.key, pems.chain)

    def of_server(self) -> grpc.ServerCredentials:
        """Return credentials of a port. Each new connection uses the certificates that are current then."""
        used = self.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            before, used = used, self.current()
            return None if used is before else _configuration(used)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(used),
            newer,  # type: ignore[arg-type]  # gRPC documents None, but its types lack it
            self.verifies,
        )


def _configuration(pems: PemFiles) -> grpc.ServerCertificateConfiguration:
    if pems.key is None or pems.chain is None:
        raise InvalidRequest("flags grpc_cert and grpc_key: a server with TLS needs both", field="grpc_cert")
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.authorities)


def _read(config: GrpcFlags) -> PemFiles:
    chain = None if config.grpc_cert is None else _read_certificates("grpc_cert", config.grpc_cert)
    authorities = None if config.grpc_ca is None else _read_certificates("grpc_ca", config.grpc_ca)
    key = None
    if config.grpc_cert is not None and config.grpc_key is not None:  # the flags require each other
        key = read_file("grpc_key", config.grpc_key)
        _check_pair(config.grpc_cert, config.grpc_key)
    return PemFiles(chain, key, authorities)


def _read_certificates(flag: str, path: str) -> bytes:
    content = read_file(flag, path)
    text = content.decode("ascii", errors="ignore")  # text between certificates may be in any language
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise InvalidRequest(f"flag {flag}={path}: contains no certificate in PEM format", field=flag) from None
    return content


def _check_pair(cert: str, key: str) -> None:
    try:  # without this argument it would ask for a password on the terminal
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser(), password="")
    except OSError as error:  # ``SSLError`` is a subclass; a file may also have been removed meanwhile
        if "MISMATCH" in (getattr(error, "reason", "") or ""):
            why = f"is not the key of grpc_cert={cert}; give the certificate and key of one pair"
        else:
            why = "contains no private key in PEM format, or one with a password; remove the password"
        raise InvalidRequest(f"flag grpc_key={key}: {why}", field="grpc_key") from None
