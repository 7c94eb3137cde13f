"""The flags of a scheduler."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from services.common.config.keys import KeysConfig
from services.common.config.metrics import MetricsConfig
from services.common.flags import AutoBool, Bool, Examples, Float, Int, Strings
from services.common.logprobs_mode import LogprobsMode

PRIORITY_CLASSES = ("high", "normal", "low")


class SchedulerConfig(KeysConfig, MetricsConfig):
    """One scheduler: one replica's queue, pages and plans."""

    examples: ClassVar[Examples] = (
        ("", "on 127.0.0.1:10310, for the worker that toka-worker starts on this host"),
        ("model=/models/M worker_addresses=node1:10410,node2:10410", "for a replica of two ranks, one on each host"),
    )

    scheduler_listen: str = Field("127.0.0.1:10310", description="address to listen on, host:port or unix:path")
    worker_addresses: Strings = Field(
        ("127.0.0.1:10410",), min_length=1, description="the replica's workers, one for each rank, in any order"
    )
    scheduling_steps_ahead: Int = Field(2, ge=2, le=64, description="plans in flight to the worker")
    max_queued_sequences: Int = Field(65536, ge=1, description="accepted and not running; more are refused")
    max_samples_per_request: Int = Field(16384, ge=1, description="largest n")
    prefix_caching: Bool = Field(True, description="reuse KV pages of equal prefixes across requests")
    stats_report_seconds: Float = Field(
        10.0, ge=0, description="seconds between log lines about load, and between datagrams to statsd; 0 = none"
    )
    statsd_server_url: str | None = Field(
        None, min_length=1, description="HOST:PORT of a statsd server that is told the load over UDP"
    )
    statsd_prefix: str = Field("tokasaurus", pattern=r"^[A-Za-z0-9_.-]+$", description="of the names told to statsd")
    admission: Literal["predicted", "guaranteed"] = Field(
        "predicted", description="answers are taken to be as long as earlier ones were, or as their limits"
    )
    guaranteed_classes: Strings = Field(
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
        description="log-probabilities of requests that do not say: the model's own, or of what tokens are drawn from",
    )
    use_hydragen: AutoBool = Field("auto", description="shared-prefix attention; auto: where the worker has it")
    hydragen_min_group_size: Int = Field(32, ge=2, description="fewest sequences in a Hydragen group")
    hydragen_min_prefix_len: Int = Field(256, ge=1, description="fewest tokens that a Hydragen group shares")
    pp_size: Int = Field(1, ge=1, le=64, description="pipeline stages of a replica")
    pp_num_buffer_stages: Int = Field(
        1, ge=0, le=64, description="a step is cut into pp_size + so many micro-batches; with pp_size=1 it is not cut"
    )
    record_plans: str | None = Field(None, min_length=1, description="directory to record every plan and result in")

    @field_validator("worker_addresses")
    @classmethod
    def _workers_differ(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"{address} is named twice; name the address of each rank once")
        return addresses

    @field_validator("statsd_server_url")
    @classmethod
    def _a_host_and_a_port(cls, url: str | None) -> str | None:
        host, _, port = (url or "").removeprefix("udp://").rpartition(":")
        if url is not None and not (host and port.isdecimal() and 0 < int(port) < 65536):
            raise ValueError("expected HOST:PORT, such as 127.0.0.1:8125")
        return url

    @field_validator("guaranteed_classes")
    @classmethod
    def _classes_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in PRIORITY_CLASSES:
                raise ValueError(f"{name!r} is no priority class; the classes are {', '.join(PRIORITY_CLASSES)}")
        return names

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> "SchedulerConfig":
        """A flag that means nothing without another is refused without it."""
        fields = SchedulerConfig.model_fields
        for name, needed, there in (
            ("hydragen_min_group_size", "use_hydragen=T", self.use_hydragen is not False),
            ("hydragen_min_prefix_len", "use_hydragen=T", self.use_hydragen is not False),
            ("pp_num_buffer_stages", "pp_size=2 or more", self.pp_size > 1),
            ("statsd_prefix", "statsd_server_url", self.statsd_server_url is not None),
        ):
            value = getattr(self, name)
            if not there and value != fields[name].default:
                raise ValueError(f"flag {name}={value}: has no effect without {needed}; leave it out, or set both")
        if self.statsd_server_url is not None and not self.stats_report_seconds:
            raise ValueError(
                f"flag statsd_server_url={self.statsd_server_url}: is told nothing with stats_report_seconds=0; leave"
                " one of them out"
            )
        if self.admission == "guaranteed" and self.guaranteed_classes:
            raise ValueError(
                f"flag guaranteed_classes={','.join(self.guaranteed_classes)}: has no effect with admission=guaranteed,"
                " by which every class is; leave one of them out"
            )
        return self
