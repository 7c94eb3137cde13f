"""What supervisors, dashboards and clients can ask about the server."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.deployment import eventually


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
    deployment.complete(prompt="x", max_tokens=3)
    eventually(lambda: deployment.metric("toka_steps_total") > 0 and deployment.metric("toka_kv_pages_in_use") == 0)
    assert deployment.metric("toka_replica_ready") == 1
    assert deployment.metric("toka_kv_pages_total") == 1024
    assert deployment.metric("toka_generation_tokens_total") > 0
    kinds = ("free", "cached", "in_use")  # each is read from a page of its own, which may have a later load
    eventually(lambda: sum(deployment.metric(f"toka_kv_pages_{kind}") for kind in kinds) == 1024)
    assert deployment.metric("toka_plans_ahead") >= 2
    assert deployment.metric("toka_step_seconds") > 0


def test_metrics_have_the_names_that_operators_of_vllm_know(deployment, model):
    def reported(more: int, than: dict) -> dict:
        """Wait for figures of the scheduler, which it reports now and then, with ``more`` tokens ``than`` before.

        The requests that generate them have ended.
        """
        generated, running, seen = ("vllm:generation_tokens_total",), ("vllm:num_requests_running",), []

        def is_reported() -> bool:
            seen[:] = [known(deployment)]
            return seen[0][generated] >= than[generated] + more and seen[0][running] == 0

        eventually(is_reported)
        return seen[0]

    # The first figures may lack tokens that other tests generated; those are less than 100.
    first = known(deployment)
    deployment.complete(prompt="x", max_tokens=500, ignore_eos=True)
    before = reported(400, than=first)
    assert deployment.complete(prompt="four", n=2, max_tokens=11, ignore_eos=True).status_code == 200
    with httpx.stream("POST", deployment.url + "/v1/completions", json={"prompt": "y", "stream": True}) as left:
        next(left.iter_raw())
    eventually(lambda: known(deployment)["vllm:request_success_total", "abort"] == 1)
    after = reported(23, than=before)  # of both requests
    grown = {name: after[name] - before.get(name, 0) for name in after}
    usage = deployment.complete(prompt="four", max_tokens=1).json()["usage"]
    assert grown["vllm:time_to_first_token_seconds_count",] == 1
    assert grown["vllm:e2e_request_latency_seconds_count",] == 1
    assert grown["vllm:inter_token_latency_seconds_count",] == grown["vllm:time_per_output_token_seconds_count",]
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time"):
        assert grown[f"vllm:request_{name}_seconds_count",] == 2
    assert grown["vllm:request_success_total", "length"] == 2
    assert grown["vllm:request_success_total", "error"] == grown["vllm:request_success_total", "stop"] == 0
    assert grown["vllm:request_prompt_tokens_count",] == 2
    assert grown["vllm:request_prompt_tokens_sum",] == 2 * usage["prompt_tokens"]
    assert grown["vllm:request_generation_tokens_sum",] == 22
    assert grown["vllm:prefix_cache_queries_total",] == grown["vllm:prompt_tokens_total",] + usage["prompt_tokens"]
    assert grown["vllm:prefix_cache_hits_total",] >= usage["prompt_tokens"] - 1  # the sibling's
    assert grown["vllm:request_params_n_count",] == 2  # this prompt, and the one whose client left
    assert grown["vllm:request_params_n_sum",] == 3
    assert grown["vllm:request_params_max_tokens_sum",] == 11 + 16
    assert (grown["vllm:request_num_preemptions_count",], grown["vllm:request_num_preemptions_sum",]) == (2, 0)
    assert grown["vllm:iteration_tokens_total_count",] >= 11
    assert grown["vllm:iteration_tokens_total_sum",] >= 22
    assert after["vllm:num_requests_waiting_by_reason", "capacity"] == 0
    assert after["vllm:num_requests_waiting_by_reason", "deferred"] == 0
    assert after["vllm:cache_config_info",] == 1
    assert after["vllm:num_requests_waiting",] == after["vllm:num_preemptions_total",] == 0
    assert after["vllm:kv_cache_usage_perc",] == after["vllm:gpu_cache_usage_perc",] == 0


def known(deployment) -> dict[tuple[str, ...], float]:
    """Samples under vLLM's names, by name and reason; all have the one model."""
    families = text_string_to_metric_families(httpx.get(deployment.url + "/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name.startswith("vllm:")]
    models = {sample.labels.pop("model_name") for sample in samples}
    assert len(models) == 1
    named = ("finished_reason", "reason")
    reasons = (
        (sample, next(filter(None, map(sample.labels.get, named)), None))
        for sample in samples
        if "le" not in sample.labels
    )
    return {(sample.name, reason) if reason else (sample.name,): sample.value for sample, reason in reasons}


def test_counters_are_exported_as_counters(deployment):
    text = httpx.get(deployment.url + "/metrics").text
    types = {family.name: family.type for family in text_string_to_metric_families(text)}
    assert types["toka_generation_tokens"] == "counter"
    assert types["toka_kv_pages_in_use"] == "gauge"
    assert types["toka_time_to_first_token_seconds"] == "histogram"


def test_the_api_describes_itself(deployment):
    paths = httpx.get(deployment.url + "/openapi.json").json()["paths"]
    assert "requestBody" in paths["/v1/chat/completions"]["post"]
