"""The flags of ``toka``."""

import sys
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from services.common.config.gateway import GatewayConfig
from services.common.config.scheduler import SchedulerConfig
from services.common.config.service import LogLevel
from services.common.config.worker import WorkerConfig
from services.common.flags import AutoInt, Examples, Int

# What it chooses for its children itself.
_PLACES = (
    *("worker_listen", "worker_addresses", "scheduler_listen", "scheduler_addresses"),
    *("master_addr", "master_port", "dp_rank", "tp_rank", "pp_rank"),
)


class DeploymentConfig(WorkerConfig, SchedulerConfig, GatewayConfig):
    """What ``toka`` takes: everything its children take, and how many of them there are."""

    never_given = frozenset({*_PLACES, "insecure_worker"})
    examples: ClassVar[Examples] = (
        ("", "the built-in model on http://127.0.0.1:10210/v1, on a GPU where there is one, else on the CPU"),
        (
            "model=/models/Llama-3.1-8B-Instruct",
            "a Hugging Face directory, or a hub id, on one GPU, with all of its memory; toka-doctor with the same flags"
            " says whether it fits",
        ),
        ("model=/models/M dp_size=2 tp_size=2", "on four GPUs: two replicas, each on two; pp_size cuts by layers"),
        ("host=0.0.0.0 api_keys_file=keys.toml", "for other hosts, who need a key (toka-key makes one)"),
    )

    gateways: AutoInt = Field(
        "auto",
        description="gateway processes, at most 64, which share one host and port; 0: only gRPC is served; auto: by the"
        " number of processors and GPUs",
    )
    gateway_log_level: LogLevel | None = Field(None, description="log_level of the gateways; default: log_level")
    grpc_port: Int = Field(10310, ge=0, le=65000, description="direct gRPC clients: replica r listens on grpc_port + r")

    @model_validator(mode="after")
    def _refuse_what_a_cpu_has_not(self) -> "DeploymentConfig":
        """A flag is honoured or refused, never ignored."""
        if self.async_tp_threshold is not None and self.device == "cpu":
            raise ValueError(
                f"flag async_tp_threshold={self.async_tp_threshold}: only on cuda, and device is cpu; leave it out, or"
                " use device=cuda"
            )
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise ValueError(
                "flag kv_cache_dtype=fp8: only on cuda, and device is cpu; leave it at kv_cache_dtype=auto, or use"
                " device=cuda"
            )
        return self

    @field_validator("gateway_log_level", mode="before")
    @classmethod
    def _level_in_capitals(cls, value: str | None) -> str | None:
        return value.upper() if isinstance(value, str) else value

    @model_validator(mode="after")
    def _gateways_log_prompts(self) -> "DeploymentConfig":
        if self.log_prompts and self.gateway_log_level not in (None, "DEBUG", "INFO"):
            raise ValueError(
                f"flag log_prompts=T: has no effect with gateway_log_level={self.gateway_log_level}; set"
                " gateway_log_level=INFO"
            )
        return self

    @model_validator(mode="after")
    def _not_for_everybody(self) -> "DeploymentConfig":
        """In the place of a worker's own: these listen on unix sockets."""
        if self.insecure_worker:
            raise ValueError("flag insecure_worker=T: the workers of toka listen on unix sockets; leave it out")
        return self

    @model_validator(mode="after")
    def _children_are_not_placed_by_hand(self) -> "DeploymentConfig":
        for name in _PLACES:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"flag {name}: toka chooses the addresses and ranks of its children itself; leave it out, or start"
                    " toka-worker, toka-scheduler and toka-gateway yourself"
                )
        return self

    @field_validator("gateways")
    @classmethod
    def _not_too_many(cls, value: int | Literal["auto"]) -> int | Literal["auto"]:
        if value != "auto" and not 0 <= value <= 64:
            raise ValueError("expected 0 to 64, or auto")
        return value

    @model_validator(mode="after")
    def _gateways_can_share_a_port(self) -> "DeploymentConfig":
        if self.gateways != "auto" and self.gateways > 1 and not sys.platform.startswith("linux"):
            raise ValueError(
                f"flag gateways={self.gateways}: only Linux spreads connections over the processes that share a port;"
                " use gateways=1"
            )
        return self

    @model_validator(mode="after")
    def _nothing_for_gateways_that_are_not_there(self) -> "DeploymentConfig":
        for name in GatewayConfig.model_fields.keys() - SchedulerConfig.model_fields.keys():
            value = getattr(self, name)
            if not self.gateways and value != GatewayConfig.model_fields[name].default:
                raise ValueError(f"flag {name}={value}: has no effect with gateways=0; leave one of them out")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> "DeploymentConfig":
        of_schedulers = range(self.grpc_port, self.grpc_port + self.dp_size)
        if self.gateways and self.port and self.port in of_schedulers:
            raise ValueError(f"flag port={self.port}: a scheduler has it (grpc_port={self.grpc_port}); choose another")
        pages = range(self.metrics_port, self.metrics_port + self.dp_size * (1 + self.tp_size * self.pp_size))
        taken = {*of_schedulers, *((self.port, self.admin_port) if self.gateways else ())}
        if self.metrics_port and (pages[-1] > 65535 or not taken.isdisjoint(pages)):
            raise ValueError(
                f"flag metrics_port={self.metrics_port}: schedulers and workers take it and the {len(pages) - 1} ports"
                " behind it, and another flag has one of these, or they are beyond 65535; choose another"
            )
        return self


class ChosenDeploymentConfig(DeploymentConfig):
    """The config of a deployment whose number of gateways is known."""

    gateways: Int = 1
