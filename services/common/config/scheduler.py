"""The flags of a scheduler."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from services.common.config.grpc import GrpcFlags
from services.common.config.keys import KeyFlags
from services.common.config.metrics import MetricsFlags
from services.common.config.service import ServiceFlags
from services.common.config.shared import PipelineSize
from services.common.flags import AutoBool, Bool, Config, Examples, Excludes, Float, Int, Needs, Strings, distinct, each
from services.common.logprobs_mode import LogprobsMode

PRIORITY_CLASSES = ("high", "normal", "low")

_ARE_CLASSES = each(
    PRIORITY_CLASSES.__contains__, f"is no priority class; the classes are {', '.join(PRIORITY_CLASSES)}"
)


class SchedulerFlags(Config):
    """Scheduling: the queue, the KV pages and the plans of a replica."""

    scheduling_steps_ahead: Int = Field(
        2, ge=2, le=64, description="fewest plans in flight to the worker; short steps have up to 16"
    )
    max_queued_sequences: Int = Field(65536, ge=1, description="accepted and not running; more are refused")
    max_samples_per_request: Int = Field(16384, ge=1, description="largest n")
    prefix_caching: Bool = Field(True, description="reuse KV pages of equal prefixes across requests")
    stats_report_seconds: Float = Field(
        10.0, ge=0, description="seconds between log lines about load, and between datagrams to statsd; 0 = none"
    )
    statsd_server_url: Annotated[str | None, Excludes(stats_report_seconds=0)] = Field(
        None, min_length=1, description="HOST:PORT of a statsd server that gets the load over UDP"
    )
    statsd_prefix: Annotated[str, Needs("statsd_server_url")] = Field(
        "tokasaurus", pattern=r"^[A-Za-z0-9_.-]+$", description="first part of the names of statsd metrics"
    )
    admission: Literal["predicted", "guaranteed"] = Field(
        "predicted", description="predicted: assume the length of earlier answers; guaranteed: assume max_tokens"
    )
    guaranteed_classes: Annotated[Strings, _ARE_CLASSES, Excludes(admission="guaranteed")] = Field(
        (), description="priority classes (high,normal,low) admitted as guaranteed whatever admission= says"
    )
    admission_margin: Float = Field(
        1.0, ge=0, allow_inf_nan=False, description="standard deviations of the forecast kept free; 0 = none"
    )
    priority_ageing_seconds: Float = Field(
        30.0, ge=0, le=1e6, description="seconds of waiting that outweigh one priority class; 0 = strict priorities"
    )
    logprobs_mode: LogprobsMode = Field(
        "raw",
        description="default for requests. raw: the model's distribution; processed: that of the sampler",
    )
    use_hydragen: AutoBool = Field("auto", description="shared-prefix attention; auto: where the worker has it")
    hydragen_min_group_size: Annotated[Int, Needs("use_hydragen")] = Field(
        32, ge=2, description="fewest sequences in a Hydragen group"
    )
    hydragen_min_prefix_len: Annotated[Int, Needs("use_hydragen")] = Field(
        256, ge=1, description="fewest tokens that a Hydragen group shares"
    )
    pp_size: PipelineSize = 1
    pp_num_buffer_stages: Annotated[Int, Needs("pp_size", least=2)] = Field(
        1, ge=0, le=64, description="micro-batches of a step in addition to pp_size; with pp_size=1 a step is not cut"
    )
    record_plans: str | None = Field(None, min_length=1, description="directory to record every plan and result in")

    @field_validator("statsd_server_url")
    @classmethod
    def _a_host_and_a_port(cls, url: str | None) -> str | None:
        host, _, port = (url or "").removeprefix("udp://").rpartition(":")
        if url is not None and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("expected HOST:PORT, such as 127.0.0.1:8125")
        return url


class SchedulerPlaceFlags(Config):
    """Addresses of a scheduler and of its workers. ``toka`` chooses them itself."""

    scheduler_listen: str = Field("127.0.0.1:10310", description="address to listen on, host:port or unix:path")
    worker_addresses: Annotated[Strings, distinct("name the address of each rank once")] = Field(
        ("127.0.0.1:10410",), min_length=1, description="the replica's workers, one for each rank, in any order"
    )


class SchedulerConfig(SchedulerPlaceFlags, SchedulerFlags, KeyFlags, MetricsFlags, ServiceFlags, GrpcFlags):
    """A scheduler: one replica's queue, pages and plans."""

    examples: ClassVar[Examples] = (
        ("", "on 127.0.0.1:10310, for the worker that toka-worker starts on this host"),
        ("model=/models/M worker_addresses=node1:10410,node2:10410", "for a replica of two ranks, one on each host"),
    )
