"""The flags of a gateway."""

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.common.config.grpc import GrpcFlags, refuse_unverified_schedulers
from services.common.config.keys import KeyFlags
from services.common.config.service import ServiceFlags
from services.common.flags import AutoInt, Bool, Config, Examples, Excludes, Float, Int, Needs, Strings, each, within

MOST_CONNECTIONS = 65_536  # of a gateway whose max_connections is auto

_ABOVE_INFO = ("WARNING", "ERROR")
_LOGS_INFO = Excludes(log_level=_ABOVE_INFO, gateway_log_level=_ABOVE_INFO)
_ARE_ORIGINS = each(
    re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#]+").fullmatch,
    "is no origin; write SCHEME://HOST or SCHEME://HOST:PORT, or * for all",
)


class GatewayFlags(Config):
    """HTTP, and what a gateway stores."""

    host: str = Field("127.0.0.1", description="where HTTP is served; 0.0.0.0: for other hosts")
    port: Int = Field(10210, ge=0, le=65535, description="port of HTTP; 0: any free port")
    strict_model_names: Bool = Field(
        False, description="an unknown model name is refused with 404; F: the only served model answers under any name"
    )
    max_body_bytes: Int = Field(32 * 1024 * 1024, ge=1024, description="largest HTTP request; beyond it: 413")
    max_bodies_bytes: Int = Field(
        512 * 1024 * 1024,
        ge=1024,
        description="bodies of all requests of a gateway together, until they are answered; beyond it: 503",
    )
    max_choices: Int = Field(16384, ge=1, description="largest prompts x n of one HTTP request")
    max_prompt_tokens: Int | None = Field(None, ge=1, description="longest prompt; default: what the context holds")
    max_output_tokens: Int | None = Field(
        None, ge=1, description="largest max_tokens, and its default in a chat; default: what the context holds"
    )
    max_connections: Annotated[AutoInt, within(1)] = Field(
        "auto",
        description="open HTTP connections of a gateway; beyond it: 503; auto: what the limit of open files allows, at"
        f" most {MOST_CONNECTIONS}",
    )
    max_header_bytes: Int = Field(64 * 1024, ge=1024, description="largest head of an HTTP request; beyond it: 431")
    slow_request_seconds: Float = Field(
        30.0, gt=0, le=3600, description="time for the head of a request, and for each 16 KiB of its body"
    )
    keep_alive_seconds: Float = Field(
        120.0, gt=0, le=3600, description="time for which an idle connection stays open; longer than in clients' pools"
    )
    cors_origins: Annotated[Strings, _ARE_ORIGINS] = Field(
        (), description="origins whose web pages may call the API, such as https://chat.example.com; *: all"
    )
    http_cert: Annotated[str | None, Needs("http_key")] = Field(
        None, min_length=1, description="PEM with the certificates of HTTPS"
    )
    http_key: Annotated[str | None, Needs("http_cert")] = Field(None, min_length=1, description="PEM with their key")
    admin_host: Annotated[str, Needs("admin_port")] = Field(
        "127.0.0.1", min_length=1, description="where admin_port listens"
    )
    admin_port: Int = Field(
        0, ge=0, le=65535, description="port of /metrics and of the replicas' state; 0: the port of the API"
    )
    log_prompts: Annotated[Bool, _LOGS_INFO] = Field(
        False, description="log the prompt and the answer of each request, at most 4096 characters of each"
    )
    replica_metrics: Bool = Field(
        True, description="/metrics shows schedulers' figures; F: they are read from their own metrics_port"
    )
    store_dir: str = Field(
        "~/.local/share/tokasaurus", min_length=1, description="files, batches, responses: a directory, or fsspec's URL"
    )
    store_url: str | None = Field(
        None, description="SQLAlchemy URL of their database; default: SQLite in store_dir; none: nothing is stored"
    )
    failover_seconds: Float = Field(
        120.0,
        ge=0,
        le=86400,
        description="time that a request, new or of a lost scheduler, waits for a scheduler; 0 = it ends",
    )
    batch_concurrency: Int = Field(512, ge=1, le=65536, description="lines of batches that one gateway runs at once")
    tool_call_parser: Literal["auto", "llama3", "hermes", "none"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template does; none: they stay text"
    )
    reasoning_parser: Literal["auto", "qwen3", "gpt_oss", "none"] = Field(
        "auto",
        description="qwen3: <think>...</think> is the model's reasoning; gpt_oss: the channel analysis is; auto: as its"
        " chat template does",
    )

    @model_validator(mode="after")
    def _the_largest_body_fits(self) -> Self:
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"flag max_bodies_bytes={self.max_bodies_bytes}: one body may have max_body_bytes="
                f"{self.max_body_bytes}; raise the first, or lower the second"
            )
        return self

    @model_validator(mode="after")
    def _admin_port_is_its_own(self) -> Self:
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(f"flag admin_port={self.admin_port}: port has it already; choose another, or leave it out")
        return self


class GatewayPlaceFlags(Config):
    """Addresses of the schedulers. ``toka`` chooses them itself."""

    scheduler_addresses: Strings = Field(("127.0.0.1:10310",), min_length=1, description="one for each replica")


class GatewayConfig(GatewayPlaceFlags, GatewayFlags, KeyFlags, ServiceFlags, GrpcFlags):
    """A gateway: HTTP in, sessions to every scheduler out."""

    examples: ClassVar[Examples] = (
        ("", "HTTP on 127.0.0.1:10210, for the scheduler that toka-scheduler starts on this host"),
        ("host=0.0.0.0 scheduler_addresses=node1:10310,node2:10310", "for other hosts, in front of two replicas"),
    )

    @model_validator(mode="after")
    def _schedulers_are_verified(self) -> Self:
        refuse_unverified_schedulers(self)
        return self
