"""Registries of a service's ``/metrics`` page."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.registry import Collector


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    """Return a registry with ``collectors`` and standard metrics of this process."""
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)
    return registry
