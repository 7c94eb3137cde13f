"""The flags of a service that has its metrics on a port of their own."""

from pydantic import Field, model_validator

from services.common.config.service import ServiceConfig
from services.common.flags import Int


class MetricsConfig(ServiceConfig):
    """Of schedulers and workers; a gateway has its metrics on ``port`` or ``admin_port``."""

    metrics_host: str = Field("127.0.0.1", min_length=1, description="where metrics_port listens")
    metrics_port: Int = Field(
        0, ge=0, le=65535, description="/metrics of schedulers and workers is served here, in plain HTTP; 0: it is not"
    )

    @model_validator(mode="after")
    def _a_host_has_a_port(self) -> "MetricsConfig":
        if not self.metrics_port and self.metrics_host != MetricsConfig.model_fields["metrics_host"].default:
            raise ValueError(
                f"flag metrics_host={self.metrics_host}: has no effect without metrics_port; leave it out, or set both"
            )
        return self
