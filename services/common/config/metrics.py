"""The flags of a service that has its metrics on a port of their own."""

from typing import Annotated

from pydantic import Field

from services.common.flags import Config, Int, Needs


class MetricsFlags(Config):
    """Metrics of schedulers and workers. A gateway has its metrics on ``port`` or ``admin_port``."""

    metrics_host: Annotated[str, Needs("metrics_port")] = Field(
        "127.0.0.1", min_length=1, description="where metrics_port listens"
    )
    metrics_port: Int = Field(
        0, ge=0, le=65535, description="/metrics of schedulers and workers is served here, in plain HTTP; 0: it is not"
    )
