"""Our own histogram, and what schedulers report, as Prometheus reads them."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import generate_latest

from services.gateway.app.probes import metrics as metrics_page
from services.gateway.engine.metrics import Histogram, RequestMetrics, make_registry
from services.gateway.engine.numbers import Numbers
from services.gateway.engine.replica_metrics import ReplicaMetrics
from tests.gateway.turns import counting_turns
from tokasaurus.scheduler.v1 import observe_pb2


def test_a_histogram_is_cumulative_and_weighs_observations():
    histogram = Histogram(Numbers(), "test", "A test", known_bounds=(), bounds=(1.0, 2.0))
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
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(id="m"))


def test_known_names_have_their_bounds_and_the_same_counts():
    metrics = RequestMetrics()
    for value in (0.0009, 0.003, 0.03, 100.0, 5000.0):
        metrics.inter_token.observe(value)
    families = {family.name: family for family in metrics.families("m")}
    own, *known = (
        {sample.labels["le"]: sample.value for sample in families[name].samples if "le" in sample.labels}
        for name in (
            "toka_inter_token_latency_seconds",
            "vllm:inter_token_latency_seconds",
            "vllm:time_per_output_token_seconds",
        )
    )
    assert known[0] == known[1] == {le: own[le] for le in known[0]}
    assert list(known[0])[:2] == ["0.01", "0.025"]
    assert (own["0.001"], own["0.005"], known[0]["0.01"], known[0]["0.05"], known[0]["80.0"]) == (1, 2, 2, 3, 3)
    assert known[0]["+Inf"] == own["+Inf"] == 5
    assert not [name for family in metrics.families("") if (name := family.name).startswith("vllm:")]


# Dashboards for vLLM read these series, so their bounds are vLLM's.
FIRST_TOKEN = (
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
)
INTER_TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
LATENCY = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
TOKENS = " ".join(f"{digit * 10**power}.0" for power in range(6) for digit in (1, 2, 5))
VLLM_BOUNDS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "inter_token_latency_seconds": INTER_TOKEN,
    "time_per_output_token_seconds": INTER_TOKEN,
    **dict.fromkeys(
        ("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
         "request_decode_time_seconds", "request_inference_time_seconds"), LATENCY,
    ),
    **dict.fromkeys(("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"), TOKENS),
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
    "request_num_preemptions": "0.0 1.0 2.0 5.0 10.0 20.0",
}  # fmt: skip


def test_series_with_names_of_vllm_have_its_bounds():
    families = {family.name.removeprefix("vllm:"): family for family in RequestMetrics().families("m")}
    for name, bounds in VLLM_BOUNDS.items():
        found = [sample.labels["le"] for sample in families[name].samples if "le" in sample.labels]
        assert found == [*bounds.split(), "+Inf"], name


def test_without_figures_only_which_replicas_are_ready_is_shown():
    replicas = ReplicaMetrics([Reporting(observe_pb2.Load(running_sequences=3))], figures=False)
    assert [family.name for family in replicas.collect()] == ["toka_replica_ready"]


def test_every_counter_of_a_scheduler_is_shown():
    names = [field.name for field in observe_pb2.Counters.DESCRIPTOR.fields]
    counters = observe_pb2.Counters(**{name: number for number, name in enumerate(names, 1)})
    families = list(ReplicaMetrics([Reporting(observe_pb2.Load(counters=counters))]).collect())
    shown = {
        sample.name + sample.labels.get("stage", ""): sample.value
        for family in families
        if family.type == "counter"
        for sample in family.samples
    }
    for name in shown:
        if "seconds" in name:
            shown[name] *= 1e9  # reported in nanoseconds
    assert {round(value, 3) for value in shown.values()} == set(range(1, len(names) + 1))
    assert round(shown["toka_step_loop_seconds_totalplan"]) == counters.loop_plan_ns
    assert shown["vllm:generation_tokens_total"] == counters.generated_tokens
    assert shown["vllm:num_preemptions_total"] == counters.preemptions
    assert round(shown["toka_device_idle_seconds_total"]) == counters.device_idle_ns
    assert shown["toka_hydragen_rows_total"] == counters.hydragen_rows
    assert shown["toka_batch_rows_total"] == counters.batch_rows
    assert shown["toka_queue_overtakes_total"] == counters.overtakes
    assert shown["toka_postponed_plans_total"] == counters.postponed_plans


async def test_other_tasks_run_while_the_page_is_written():
    """Writing all families takes 10 ms, for which streams would stand still."""
    registry = make_registry(RequestMetrics(), ReplicaMetrics([]), [Path("none")], lambda: "m")
    state = SimpleNamespace(gateway=SimpleNamespace(registry=registry))
    async with counting_turns() as turns:
        response = await metrics_page(SimpleNamespace(app=SimpleNamespace(state=state)))
    assert response.body == generate_latest(registry)
    assert turns.count >= len(list(registry.collect())) > 20
