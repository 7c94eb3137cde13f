"""Certificates for tests, made on the spot."""

import ipaddress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.common.config import GrpcFlags


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

    def issue(
        self,
        name: str,
        *,
        expired: bool = False,
        early: bool = False,
        host: str = "localhost",
        for_servers_only: bool = False,
        through: Pair | None = None,
    ) -> Pair:
        """Write a certificate and its key.

        ``early``: it is not valid yet. ``host``: its only name, instead of those of this host. ``through``: this
        certificate signs it, and stands in its chain.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, signer, chain = self._name, self._key, b""
        if through is not None:
            chain = through.cert.read_bytes()
            issuer = x509.load_pem_x509_certificate(chain).subject
            signer = serialization.load_pem_private_key(through.key.read_bytes(), None)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.DNSName(host)]
        if host == "localhost":
            names.append(x509.IPAddress(ipaddress.ip_address("127.0.0.1")))
        from_day, to_day = (1, 2) if early else (-2, -1) if expired else (-2, 1)
        builder = _builder(subject, issuer, key, from_day, to_day)
        builder = builder.add_extension(x509.SubjectAlternativeName(names), False)
        if for_servers_only:
            builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
        return self._write(name, _pem(builder.sign(signer, hashes.SHA256())) + chain, key)

    def own(self) -> Pair:
        """Write the authority's own certificate, which is self-signed, and its key."""
        return self._write("own", self.cert.read_bytes(), self._key)

    def _write(self, name: str, chain: bytes, key: ec.EllipticCurvePrivateKey) -> Pair:
        pair = Pair(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        pair.cert.write_bytes(chain)
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


def links(authority: Authority | None, pair: Pair | None = None) -> GrpcFlags:
    return GrpcFlags(**flags(authority, pair))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, from_day: int = -2, to_day: int = 1
) -> x509.CertificateBuilder:
    """Return a certificate that is valid between two days, counted from now."""
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now + timedelta(days=from_day)).not_valid_after(now + timedelta(days=to_day))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
