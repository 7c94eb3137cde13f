"""The flags of ``toka``."""

import sys
from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from services.common.config.gateway import GatewayFlags, GatewayPlaceFlags
from services.common.config.grpc import GrpcFlags, refuse_unused_authorities, refuse_unverified_schedulers
from services.common.config.keys import KeyFlags
from services.common.config.metrics import MetricsFlags
from services.common.config.scheduler import SchedulerFlags, SchedulerPlaceFlags
from services.common.config.service import LogLevel, ServiceFlags
from services.common.config.worker import MASTER_PORT, WorkerFlags, WorkerPlaceFlags
from services.common.flags import AutoInt, Config, Examples, Excludes, Int, cuda_only, within

_OWN_PLACES = (
    "toka chooses the addresses and ranks of its children itself; leave it out, or start toka-worker, toka-scheduler"
    " and toka-gateway yourself"
)
_NO_GATEWAYS = Excludes(gateways=0)


class DeploymentFlags(Config):
    """The number of gateways, and what they have of their own."""

    gateways: Annotated[AutoInt, within(0, 64)] = Field(
        "auto",
        description="gateway processes, at most 64, which share one host and port; 0: only gRPC is served; auto: 1"
        " with workers on CPUs and with api_keys_file, else by the number of processors",
    )
    gateway_log_level: LogLevel | None = Field(None, description="log_level of the gateways; default: log_level")
    grpc_port: Int = Field(10310, ge=0, le=65000, description="direct gRPC clients: replica r listens on grpc_port + r")

    @model_validator(mode="after")
    def _gateways_can_share_a_port(self) -> Self:
        if self.gateways != "auto" and self.gateways > 1 and not sys.platform.startswith("linux"):
            raise ValueError(
                f"flag gateways={self.gateways}: only Linux spreads connections over the processes that share a port;"
                " use gateways=1"
            )
        return self


class DeploymentConfig(
    DeploymentFlags, WorkerFlags, SchedulerFlags, GatewayFlags, KeyFlags, MetricsFlags, ServiceFlags, GrpcFlags
):
    """A deployment on one host: the flags of its children, and how many gateways there are."""

    refused: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            (*WorkerPlaceFlags.model_fields, *SchedulerPlaceFlags.model_fields, *GatewayPlaceFlags.model_fields),
            _OWN_PLACES,
        ),
        "insecure_worker": "the workers of toka listen on unix sockets; leave it out",
    }
    examples: ClassVar[Examples] = (
        ("", "the built-in model on http://127.0.0.1:10210/v1, on a GPU where there is one, else on the CPU"),
        (
            "model=/models/Llama-3.1-8B-Instruct",
            "a Hugging Face directory, or a hub id, on one GPU, with all of its memory; toka-doctor with the same flags"
            " says whether it fits",
        ),
        ("model=/models/M dp_size=2 tp_size=2", "on four GPUs: two replicas, each on two; pp_size cuts by layers"),
        (
            "host=0.0.0.0 api_keys_file=keys.toml",
            "serve other hosts, whose clients need a key (toka-key creates one)",
        ),
    )

    @model_validator(mode="after")
    def _a_cpu_supports_it(self) -> Self:
        if self.device == "cpu":
            for name, value, fix in cuda_only(self):
                raise ValueError(f"flag {name}={value}: only on cuda, and device is cpu; {fix}, or use device=cuda")
        return self

    @model_validator(mode="after")
    def _gateways_exist_for_their_flags(self) -> Self:
        for name in GatewayFlags.model_fields:
            _NO_GATEWAYS.check(self, name)
        return self

    @model_validator(mode="after")
    def _links_are_verified(self) -> Self:
        refuse_unused_authorities(self)
        refuse_unverified_schedulers(self)
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> Self:
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
    """The config of a deployment whose number of gateways is known, and the port where ranks meet."""

    gateways: Int = 1
    master_port: Int = MASTER_PORT
