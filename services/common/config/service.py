"""What every program takes."""

from typing import Literal

from pydantic import Field, field_validator

from services.common.config.grpc import GrpcConfig
from services.common.flags import Bool, Float

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class ServiceConfig(GrpcConfig):
    """What every program takes."""

    model: str = Field("builtin", description="Hugging Face directory or hub id; 'builtin' = the model in this package")
    tokenizer: str | None = Field(None, description="directory or hub id of the tokenizer; default: the model's")
    served_model_name: str | None = Field(None, description="model id in the API; default: the model's directory name")
    log_level: LogLevel = "INFO"
    step_deadline: Float = Field(
        30.0, ge=1, le=1e6, description="seconds without progress, while work waits, after which a process is hung"
    )
    drain_seconds: Float = Field(
        30.0, ge=0, le=1e6, description="SIGTERM lets running requests go on for so long at most; 0 = not at all"
    )
    watchdog: Bool = Field(True, description="a hung process is killed, to be started again; F: for debuggers")

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: str) -> str:
        return value.upper() if isinstance(value, str) else value
