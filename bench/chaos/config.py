"""The flags of ``bench.chaos`` and ``bench.soak``."""

from typing import Literal

from pydantic import Field, field_validator

from bench.chaos.schedule import KINDS
from services.common.flags import Config, Float, Int, Strings


class ClusterConfig(Config):
    """Of the deployment."""

    worker: Literal["cpu", "fake"] = Field("cpu", description="cpu: the built-in model; fake: a hash, and no torch")
    gateways: Int = Field(2, ge=1)
    replicas: Int = Field(2, ge=1, description="a scheduler and a worker each")
    step_ms: Float = Field(10.0, ge=0, description="of the fake worker")
    flags: Strings = Field((), description="flags of services, such as step_deadline=10: each goes to all that have it")
    netns: Literal["auto", "T", "F"] = Field(
        "auto", description="services in network namespaces, so that they can be cut off (root); auto: if possible"
    )
    directory: str | None = Field(
        None, description="for logs and stories; default: a temporary one, which stays only if something went wrong"
    )


class ChaosConfig(ClusterConfig):
    """Of the chaos."""

    seconds: Float = Field(600.0, gt=0)
    flags: Strings = Field(
        ("step_deadline=10", "drain_seconds=15"), description=ClusterConfig.model_fields["flags"].description
    )
    streams: Int = Field(200, ge=1, description="clients that ask one question after the other")
    faults: Int | None = Field(None, ge=0, description="default: one for each 6 seconds")
    kinds: Strings = Field(KINDS, min_length=1, description="of faults, which take turns")
    longest_fault: Float = Field(20.0, ge=1, description="most seconds that a stop or a partition lasts")
    questions: Int = Field(60, ge=1, description="different requests")
    hang_seconds: Float = Field(180.0, gt=0, description="without anything new a request hangs; longer than recoveries")
    seed: Int = Field(1, description="of the faults and of the clients")

    @field_validator("kinds")
    @classmethod
    def _kinds_exist(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is no kind of fault; the kinds are {', '.join(KINDS)}")
        return kinds
