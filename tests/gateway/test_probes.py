"""What supervisors, dashboards and clients can ask about the server."""

import httpx
from prometheus_client.parser import text_string_to_metric_families


def test_health_ready_and_ping(deployment):
    assert httpx.get(deployment.url + "/health").json() == {"status": "ok"}
    assert httpx.get(deployment.url + "/ping").text == "pong"
    ready = httpx.get(deployment.url + "/ready")
    assert ready.status_code == 200
    assert ready.json()["ready"] is True
    assert [replica["address"] for replica in ready.json()["replicas"]] == [deployment.scheduler_address]


def test_whoever_asks_for_the_head_only_gets_the_same_status(deployment):
    for path in ("/health", "/ready", "/ping", "/v1/models"):
        answer = httpx.head(deployment.url + path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_models(sdk, model):
    assert [entry.id for entry in sdk.models.list()] == [model]
    retrieved = sdk.models.retrieve(model)
    assert (retrieved.id, retrieved.object) == (model, "model")


def test_metrics_count_requests_and_time_them(deployment):
    names = (
        "toka_time_to_first_token_seconds_count",
        "toka_e2e_request_latency_seconds_count",
        "toka_inter_token_latency_seconds_count",
        "toka_request_queue_time_seconds_count",
        "toka_request_success_total",
        "toka_http_requests_total",
    )
    deployment.complete(prompt="x", max_tokens=3)
    before = {name: deployment.metric(name) for name in names}
    assert deployment.complete(prompt="x", n=2, max_tokens=11).status_code == 200
    after = {name: deployment.metric(name) for name in names}
    grown = {name: after[name] - before[name] for name in names}
    assert grown["toka_time_to_first_token_seconds_count"] == 1
    assert grown["toka_e2e_request_latency_seconds_count"] == 1
    assert 0 < grown["toka_inter_token_latency_seconds_count"] <= 20  # the first message may hold several tokens
    assert grown["toka_request_queue_time_seconds_count"] == 2
    assert grown["toka_request_success_total"] == 2
    assert grown["toka_http_requests_total"] >= 1


def test_metrics_tell_what_schedulers_report(deployment):
    assert deployment.metric("toka_replica_ready") == 1
    assert deployment.metric("toka_kv_pages_total") == 1024
    assert deployment.metric("toka_steps_total") > 0
    assert deployment.metric("toka_generation_tokens_total") > 0
    pages = [deployment.metric(f"toka_kv_pages_{kind}") for kind in ("free", "cached", "in_use")]
    assert sum(pages) == 1024


def test_counters_are_exported_as_counters(deployment):
    text = httpx.get(deployment.url + "/metrics").text
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert types["toka_generation_tokens"] == "counter"
    assert types["toka_kv_pages_in_use"] == "gauge"
    assert types["toka_time_to_first_token_seconds"] == "histogram"


def test_the_api_describes_itself(deployment):
    paths = httpx.get(deployment.url + "/openapi.json").json()["paths"]
    assert "requestBody" in paths["/v1/chat/completions"]["post"]
