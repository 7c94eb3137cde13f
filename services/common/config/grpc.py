"""Certificates of gRPC links."""

from pydantic import Field, model_validator

from services.common.flags import Config


class GrpcConfig(Config):
    """Certificates of gRPC links. A server with a certificate speaks TLS, and with authorities wants its clients' ones
    (mTLS). A client with authorities speaks TLS, and with a certificate shows it. Unix sockets have neither."""

    grpc_cert: str | None = Field(
        None, min_length=1, description="PEM file: the certificate of gRPC links, its chain behind it"
    )
    grpc_key: str | None = Field(None, min_length=1, description="PEM file: its private key")
    grpc_ca: str | None = Field(
        None, min_length=1, description="PEM file: authorities that the other side's certificate must come from"
    )
    grpc_server_name: str | None = Field(
        None, min_length=1, description="name in the certificates of servers that are reached by another one"
    )

    @model_validator(mode="after")
    def _certificates_are_whole(self) -> "GrpcConfig":
        for name, needed in (("grpc_cert", "grpc_key"), ("grpc_key", "grpc_cert"), ("grpc_server_name", "grpc_ca")):
            if (value := getattr(self, name)) is not None and getattr(self, needed) is None:
                raise ValueError(f"flag {name}={value}: has no effect without {needed}=; leave it out, or set both")
        return self

    @property
    def has_mutual_tls(self) -> bool:
        """Its servers know who their clients are."""
        return self.grpc_cert is not None and self.grpc_ca is not None
