"""Certificates for tests, made on the spot."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.common.config import GrpcConfig


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in files."""

    cert: Path
    key: Path

    def replace(self, other: "Pair") -> None:
        """Become ``other``, as an operator replaces files: one after the other."""
        for mine, new in ((self.cert, other.cert), (self.key, other.key)):
            fresh = mine.with_suffix(".new")
            fresh.write_bytes(new.read_bytes())
            fresh.rename(mine)


class Authority:
    """Signs certificates of 127.0.0.1 and localhost, and keeps all files in ``directory``."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self.cert = directory / f"{name}.pem"
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        builder = _builder(self._name, self._name, self._key).add_extension(x509.BasicConstraints(True, None), True)
        self.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))

    def issue(self, name: str, *, expired: bool = False, host: str = "localhost") -> Pair:
        """``host``: another name than those of this host; with one, it has no other."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.DNSName(host)]
        if host == "localhost":
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        days = -1 if expired else 1
        builder = _builder(subject, self._name, key, days).add_extension(x509.SubjectAlternativeName(names), False)
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pair.cert.write_bytes(_pem(builder.sign(self._key, hashes.SHA256())))
        pair.key.touch(0o600)
        pair.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return pair


def flags(authority: Authority | None, pair: Pair | None = None) -> dict[str, str]:
    """As every program takes them."""
    found = {} if authority is None else {"grpc_ca": str(authority.cert)}
    return found if pair is None else found | {"grpc_cert": str(pair.cert), "grpc_key": str(pair.key)}


def links(authority: Authority | None, pair: Pair | None = None) -> GrpcConfig:
    return GrpcConfig(**flags(authority, pair))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int = 1):
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - timedelta(days=2)).not_valid_after(now + timedelta(days=days))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
