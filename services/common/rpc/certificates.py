"""The certificates of a process's gRPC links: PEM files, read again when they change."""

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from services.common.config import GrpcConfig
from services.common.errors import InvalidRequest
from services.common.host.file_watch import FileWatch
from services.common.host.secret_files import read_file, warn_if_not_secret

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Pems:
    """What the files held; None where there is none."""

    chain: bytes | None
    key: bytes | None
    authorities: bytes | None


class Certificates:
    """Owned by a server or a dialer. Any thread may call: handshakes happen on gRPC's."""

    def __init__(self, config: GrpcConfig) -> None:
        """Raises ``InvalidRequest`` for files that cannot be used."""
        self._config = config
        self._lock = threading.Lock()
        files = filter(None, (config.grpc_cert, config.grpc_key, config.grpc_ca))
        self._file_watch = FileWatch(Path(file).expanduser() for file in files)
        self._pems = _read(config)
        if config.grpc_key is not None:
            warn_if_not_secret("grpc_key", config.grpc_key)

    @classmethod
    def of(cls, config: GrpcConfig) -> "Certificates | None":
        """None where the flags name no files."""
        return None if config.grpc_cert is None and config.grpc_ca is None else cls(config)

    def current(self) -> Pems:
        """What the files hold now, or held before they became wrong, which is logged."""
        with self._lock:
            if self._file_watch.changed():
                try:
                    self._pems = _read(self._config)
                    log.info("certificates read again")
                except InvalidRequest as error:
                    log.error("the certificates stay as they were", reason=error.message)
            return self._pems

    @property
    def serves(self) -> bool:
        """A server with these speaks TLS."""
        return self._config.grpc_cert is not None

    @property
    def verifies(self) -> bool:
        """A client with these speaks TLS, and a server that speaks it wants certificates of its clients."""
        return self._config.grpc_ca is not None

    def of_client(self) -> grpc.ChannelCredentials:
        """For one channel: a connection that it makes later shows what it shows now."""
        pems = self.current()
        return grpc.ssl_channel_credentials(pems.authorities, pems.key, pems.chain)

    def of_server(self) -> grpc.ServerCredentials:
        """For a port: each connection is shown what there is at its time."""
        shown = self.current()

        def newer() -> grpc.ServerCertificateConfiguration | None:
            nonlocal shown
            before, shown = shown, self.current()
            return None if shown is before else _configuration(shown)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(shown),
            newer,  # type: ignore[arg-type]  # None, which gRPC documents, is left out of its types
            self.verifies,
        )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    if pems.key is None or pems.chain is None:
        raise InvalidRequest("flags grpc_cert and grpc_key: a server that speaks TLS needs both", field="grpc_cert")
    return grpc.ssl_server_certificate_configuration([(pems.key, pems.chain)], pems.authorities)


def _read(config: GrpcConfig) -> Pems:
    chain = None if config.grpc_cert is None else _read_certificates("grpc_cert", config.grpc_cert)
    authorities = None if config.grpc_ca is None else _read_certificates("grpc_ca", config.grpc_ca)
    key = None
    if config.grpc_cert is not None and config.grpc_key is not None:  # flags: neither without the other
        key = read_file("grpc_key", config.grpc_key)
        _check_pair(config.grpc_cert, config.grpc_key)
    return Pems(chain, key, authorities)


def _read_certificates(flag: str, path: str) -> bytes:
    content = read_file(flag, path)
    text = content.decode("ascii", errors="ignore")  # what stands between certificates may be in any language
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise InvalidRequest(f"flag {flag}={path}: holds no certificate in PEM", field=flag) from None
    return content


def _check_pair(cert: str, key: str) -> None:
    try:  # without a password it would ask for one on the terminal
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(cert).expanduser(), Path(key).expanduser(), password="")
    except OSError as error:  # ``SSLError`` is one; so is what comes of a file that is gone meanwhile
        if "MISMATCH" in (getattr(error, "reason", "") or ""):
            why = f"is not the key of grpc_cert={cert}; give the two that were made together"
        else:
            why = "holds no private key in PEM, or one with a password; write it without"
        raise InvalidRequest(f"flag grpc_key={key}: {why}", field="grpc_key") from None
