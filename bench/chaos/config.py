"""The flags of ``bench.chaos`` and ``bench.soak``."""

from typing import Literal

from pydantic import Field, field_validator

from bench.chaos.schedule import KINDS
from services.common.flags import Config, Float, Int, Strings


class ClusterConfig(Config):
    """The flags of the deployment."""

    worker: Literal["cpu", "fake"] = Field(
        "cpu", description="cpu: the built-in model; fake: a hash function, without torch"
    )
    gateways: Int = Field(2, ge=1)
    replicas: Int = Field(2, ge=1, description="replicas, each with a scheduler and a worker")
    step_ms: Float = Field(10.0, ge=0, description="time of a step of the fake worker")
    flags: Strings = Field((), description="flags of services, such as step_deadline=10, for all that have them")
    netns: Literal["auto", "T", "F"] = Field(
        "auto", description="use network namespaces, which partitions need (requires root); auto: if possible"
    )
    directory: str | None = Field(
        None, description="directory for logs and reports; default: a temporary one, which is kept only on failure"
    )


class ChaosConfig(ClusterConfig):
    """The flags of ``bench.chaos``."""

    seconds: Float = Field(600.0, gt=0)
    flags: Strings = Field(
        ("step_deadline=10", "drain_seconds=15"), description=ClusterConfig.model_fields["flags"].description
    )
    streams: Int = Field(200, ge=1, description="clients, each of which sends one request after the other")
    faults: Int | None = Field(None, ge=0, description="number of faults; default: one for each 6 seconds")
    kinds: Strings = Field(KINDS, min_length=1, description="kinds of faults, which take turns")
    longest_fault: Float = Field(20.0, ge=1, description="longest duration of a stop or a partition, in seconds")
    questions: Int = Field(60, ge=1, description="number of different requests")
    hang_seconds: Float = Field(
        180.0, gt=0, description="time without progress after which a request counts as hanging"
    )
    seed: Int = Field(1, description="seed of the faults and the clients")

    @field_validator("kinds")
    @classmethod
    def _kinds_exist(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is no kind of fault; use {', '.join(KINDS)}")
        return kinds
