"""What a service's ``/metrics`` page shows."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import Collector


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    """What ``collectors`` tell, and facts about this process."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    for facts in (ProcessCollector, PlatformCollector, GCCollector):
        facts(registry=registry)
    return registry
