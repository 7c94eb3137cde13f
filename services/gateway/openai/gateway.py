"""The parts of a gateway that its endpoints share."""

from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry

from services.common.config import GatewayConfig
from services.common.process.handover import Handover
from services.common.process.tracing import Tracing
from services.common.rpc.channel import Dialer
from services.common.text.tokenizer import Tokenizer
from services.gateway.engine.fleet import Fleet
from services.gateway.engine.metrics import RequestMetrics, make_registry
from services.gateway.engine.numbers import Numbers
from services.gateway.engine.replica_metrics import ReplicaMetrics
from services.gateway.engine.session import Timings
from services.gateway.engine.text import TextEngine
from services.gateway.http.guard import Guard
from services.gateway.openai.limits import Limits
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.store.service import StoreService


@dataclass(frozen=True)
class Gateway:
    """The parts of one gateway process, made on the event loop on which they run.

    No state of it must survive the process. The counters of its metrics are in a file, which does.
    """

    config: GatewayConfig
    limits: Limits
    guard: Guard
    store: StoreService
    text: TextEngine
    fleet: Fleet
    metrics: RequestMetrics
    registry: CollectorRegistry
    formats: OutputFormats
    tracing: Tracing | None

    @classmethod
    def make(cls, config: GatewayConfig, timings: Timings, handover: Handover | None = None) -> "Gateway":
        """Load the tokenizer and make the other parts. Raises InvalidRequest for a wrong model."""
        guard = Guard(config, 1 if handover is None else handover.count)
        tokenizer = Tokenizer.load(config.tokenizer or config.model)
        paths = handover.counter_files if handover is not None else []
        metrics = RequestMetrics(Numbers.of_file(paths[handover.index]) if handover is not None and paths else None)
        fleet = Fleet(
            config.scheduler_addresses,
            tokenizer_fingerprint=tokenizer.fingerprint,
            metrics=metrics,
            timings=replace(timings, failover=config.failover_seconds),
            dialer=Dialer.of(config, config.grpc_token_file),
            turn=None if handover is None else handover.index,
            strict_names=config.strict_model_names,
        )
        replicas = ReplicaMetrics(fleet.replicas, figures=config.replica_metrics)
        registry = make_registry(metrics, replicas, paths, lambda: ",".join(sorted(fleet.models)))
        formats = OutputFormats.of(config, tokenizer)
        store, text = StoreService(config), TextEngine(tokenizer)
        tracing = Tracing.of(config, "toka-gateway")
        return cls(config, Limits.of(config), guard, store, text, fleet, metrics, registry, formats, tracing)
