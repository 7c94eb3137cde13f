"""The flags of ``bench.soak``."""

from pydantic import Field, model_validator

from bench.chaos.config import ClusterConfig
from services.common.flags import Float, Int


class SoakConfig(ClusterConfig):
    """The flags of ``bench.soak``."""

    worker: str = Field(
        "fake", pattern="^(cpu|fake)$", description="cpu: the built-in model; fake: a hash function, without torch"
    )
    netns: str = Field("F", pattern="^(auto|T|F)$", description="as in bench.chaos; there are no partitions")
    seconds: Float = Field(3600.0, gt=0)
    settle: Float = Field(300.0, ge=0, description="seconds until the first measurement of memory")
    window: Float = Field(30.0, gt=0, description="seconds of a measurement, which is a median")
    growth: Float = Field(1.05, gt=0, description="largest allowed ratio of the last measurement to the first")
    rate: Float = Field(60.0, gt=0, description="requests per second, in addition to those of Batch jobs")
    concurrency: Int = Field(64, ge=1, description="largest number of concurrent requests")
    questions: Int = Field(60, ge=1, description="number of different requests with a known answer")
    batch_lines: Int = Field(200, ge=0, description="lines of each Batch job; 0 = no Batch jobs")
    batch_pause: Float = Field(10.0, ge=0, description="seconds from the end of a Batch job to the next one")
    seed: Int = 1

    @model_validator(mode="after")
    def _is_long_enough(self) -> "SoakConfig":
        if self.seconds < self.settle + 2 * self.window:
            raise ValueError(
                f"flag seconds={self.seconds:.0f}: shorter than settle={self.settle:.0f} and twice window="
                f"{self.window:.0f}; raise it, or lower them"
            )
        return self
