"""What the endpoints share, in one place."""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from services.common.config import GatewayConfig
from services.common.text.tokenizer import Tokenizer
from services.gateway.fleet import Fleet
from services.gateway.metrics import RequestMetrics, make_registry
from services.gateway.replica_metrics import ReplicaMetrics
from services.gateway.session.client import Timings
from services.gateway.text import TextEngine


@dataclass(frozen=True)
class Gateway:
    """Made once, on the event loop it lives on. Holds nothing that may not be lost."""

    config: GatewayConfig
    text: TextEngine
    fleet: Fleet
    metrics: RequestMetrics
    registry: CollectorRegistry

    @classmethod
    def make(cls, config: GatewayConfig, timings: Timings) -> "Gateway":
        """Load the tokenizer and make everything else around it. Raises ``InvalidRequest`` for a wrong model."""
        tokenizer = Tokenizer.load(config.tokenizer or config.model)
        metrics, registry = RequestMetrics(), make_registry()
        fleet = Fleet(
            config.scheduler_addresses, tokenizer_fingerprint=tokenizer.fingerprint, metrics=metrics, timings=timings
        )
        registry.register(metrics)
        registry.register(ReplicaMetrics(fleet.replicas))
        return cls(config, TextEngine(tokenizer), fleet, metrics, registry)
