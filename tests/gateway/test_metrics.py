"""Our own histogram, and what schedulers report, as Prometheus reads them."""

from dataclasses import dataclass

from services.gateway.metrics import Histogram
from services.gateway.replica_metrics import ReplicaMetrics
from tokasaurus.scheduler.v1 import observe_pb2


def test_a_histogram_is_cumulative_and_weighs_observations():
    histogram = Histogram("toka_test", "A test", bounds=(1.0, 2.0))
    histogram.observe(0.5, times=3)
    histogram.observe(1.0)
    histogram.observe(1.5, times=2)
    histogram.observe(9.0)
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.family().samples}
    assert samples[("toka_test_bucket", "1.0")] == 4
    assert samples[("toka_test_bucket", "2.0")] == 6
    assert samples[("toka_test_bucket", "+Inf")] == samples[("toka_test_count", None)] == 7
    assert samples[("toka_test_sum", None)] == 0.5 * 3 + 1.0 + 1.5 * 2 + 9.0


@dataclass
class Reporting:
    """As much of a replica as is looked at."""

    load: observe_pb2.Load
    address: str = "there:1"
    ready: bool = True


def test_every_counter_of_a_scheduler_is_shown():
    names = [field.name for field in observe_pb2.Counters.DESCRIPTOR.fields]
    counters = observe_pb2.Counters(**{name: number for number, name in enumerate(names, 1)})
    families = list(ReplicaMetrics([Reporting(observe_pb2.Load(counters=counters))]).collect())
    shown = {sample.name: sample.value for family in families if family.type == "counter" for sample in family.samples}
    for name in ("toka_device_busy_seconds_total", "toka_device_idle_seconds_total"):
        shown[name] *= 1e9  # reported in nanoseconds
    assert {round(value, 3) for value in shown.values()} == set(range(1, len(names) + 1))
    assert round(shown["toka_device_idle_seconds_total"]) == counters.device_idle_ns
    assert shown["toka_hydragen_rows_total"] == counters.hydragen_rows
    assert shown["toka_batch_rows_total"] == counters.batch_rows
    assert shown["toka_queue_overtakes_total"] == counters.overtakes
    assert shown["toka_postponed_plans_total"] == counters.postponed_plans
