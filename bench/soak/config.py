"""The flags of ``bench.soak``."""

from pydantic import Field, model_validator

from bench.chaos.config import ClusterConfig
from services.common.flags import Float, Int


class SoakConfig(ClusterConfig):
    """Of the soak."""

    worker: str = Field(
        "fake", pattern="^(cpu|fake)$", description="cpu: the built-in model; fake: a hash, and no torch"
    )
    netns: str = Field("F", pattern="^(auto|T|F)$", description="as of bench.chaos; nothing is cut off here")
    seconds: Float = Field(3600.0, gt=0)
    settle: Float = Field(300.0, ge=0, description="seconds until memory is measured first")
    window: Float = Field(30.0, gt=0, description="seconds over which it is measured: the median counts")
    growth: Float = Field(1.05, gt=0, description="most memory at the end, of that at first")
    rate: Float = Field(60.0, gt=0, description="requests a second, beside those of batches")
    concurrency: Int = Field(64, ge=1, description="requests that run at once at most")
    questions: Int = Field(60, ge=1, description="requests with a known answer; most are like no other")
    batch_lines: Int = Field(200, ge=0, description="lines of the batches that follow each other; 0 = none")
    batch_pause: Float = Field(10.0, ge=0, description="seconds from the end of a batch to the next one")
    seed: Int = 1

    @model_validator(mode="after")
    def _is_long_enough(self) -> "SoakConfig":
        if self.seconds < self.settle + 2 * self.window:
            raise ValueError(
                f"flag seconds={self.seconds:.0f}: shorter than settle={self.settle:.0f} and twice window="
                f"{self.window:.0f}; raise it, or lower them"
            )
        return self
