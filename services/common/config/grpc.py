"""Certificates of gRPC links."""

from typing import Annotated

from pydantic import Field

from services.common.flags import Config, Needs


class GrpcFlags(Config):
    """Certificates of gRPC links.

    A server with a certificate speaks TLS; with authorities it also demands a certificate from its clients (mTLS). A
    client with authorities speaks TLS; with a certificate it also presents that. Unix sockets use neither.
    """

    grpc_cert: Annotated[str | None, Needs("grpc_key")] = Field(
        None, min_length=1, description="PEM file: the certificate of gRPC links, its chain behind it"
    )
    grpc_key: Annotated[str | None, Needs("grpc_cert")] = Field(
        None, min_length=1, description="PEM file: its private key"
    )
    grpc_ca: str | None = Field(
        None, min_length=1, description="PEM file: authorities that the other side's certificate must come from"
    )
    grpc_server_name: Annotated[str | None, Needs("grpc_ca")] = Field(
        None, min_length=1, description="name in the certificates of servers that are reached by another one"
    )

    @property
    def has_mutual_tls(self) -> bool:
        """True if servers verify their clients."""
        return self.grpc_cert is not None and self.grpc_ca is not None


def refuse_unused_authorities(config: GrpcFlags) -> None:
    """Raise ``ValueError`` if a program that is no gRPC client has authorities and no certificate."""
    if config.grpc_ca is not None and config.grpc_cert is None:
        raise ValueError(
            f"flag grpc_ca={config.grpc_ca}: has no effect without grpc_cert= and grpc_key=; leave it out, or set all"
            " three"
        )


def refuse_unverified_schedulers(config: GrpcFlags) -> None:
    """Raise ``ValueError`` if a gateway would present its certificate to schedulers that it cannot verify."""
    if config.grpc_cert is not None and config.grpc_ca is None:
        raise ValueError(
            f"flag grpc_cert={config.grpc_cert}: a gateway shows it to schedulers that it can verify; set grpc_ca=, too"
        )
