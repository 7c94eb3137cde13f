"""What several gateways count is added up, and outlives each of them."""

import os
import subprocess
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.common.errors import Unavailable
from services.gateway.engine.codec import SampleEnding
from services.gateway.engine.metrics import RequestMetrics, make_registry
from services.gateway.engine.numbers import Numbers, counting_process


@pytest.fixture
def paths(tmp_path):
    return [tmp_path / f"gateway-{index}.numbers" for index in range(2)]


def shown(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """Every sample by name and label values."""
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert len(found) == len(samples), "a metric is shown twice"
    return found


class NoReplicas:
    """A collector of what schedulers report, without schedulers."""

    def collect(self):
        return []


def ending(tokens: int) -> SampleEnding:
    return SampleEnding("stop", False, 0, 10, tokens, 0, 0.5, 0.25, 2.0, None)


def test_whoever_is_asked_answers_for_all(paths):
    first, second = (RequestMetrics(Numbers.of_file(path)) for path in paths)
    for each in (first, second):
        each.add_routes(["/v1/chat/completions", "/v1/completions"])
    first.count_response("/v1/completions", 200)
    second.count_response("/v1/completions", 200)
    second.count_response("/v1/completions", 429)
    first.count_response("/else", 404)
    second.count_disconnect()
    first.sample_finished(ending(3))
    second.sample_finished(ending(30))
    first.inter_token.observe(0.001, times=100)
    asked = [shown(make_registry(each, NoReplicas(), paths)) for each in (first, second)]
    for found in asked:
        assert found["toka_http_requests_total", "/v1/completions", "200"] == 2
        assert found["toka_http_requests_total", "/v1/completions", "429"] == 1
        assert found["toka_http_requests_total", "other", "404"] == 1
        assert found["toka_http_disconnects_total",] == 1
        assert found["toka_request_success_total", "stop"] == 2
        assert found["toka_request_generation_tokens_sum",] == 33
        assert found["toka_request_generation_tokens_bucket", "4.0"] == 1
        assert found["toka_request_generation_tokens_bucket", "+Inf"] == 2
        assert found["toka_inter_token_latency_seconds_count",] == 100
    of_requests = [{key: value for key, value in found.items() if key[0].startswith("toka_")} for found in asked]
    assert of_requests[0] == of_requests[1]


def test_the_next_process_goes_on_counting(paths):
    program = (
        "import sys; from pathlib import Path; from services.gateway.engine.metrics import RequestMetrics;"
        " from services.gateway.engine.numbers import Numbers;"
        " RequestMetrics(Numbers.of_file(Path(sys.argv[1]))).count_disconnect()"
    )
    for _ in range(3):
        subprocess.run([sys.executable, "-c", program, paths[0]], check=True)
    last = counting_process(paths[0])
    assert last not in (None, os.getpid())
    metrics = RequestMetrics(Numbers.of_file(paths[0]))
    metrics.count_disconnect()
    assert counting_process(paths[0]) == os.getpid()
    assert shown(make_registry(metrics, NoReplicas(), paths))["toka_http_disconnects_total",] == 4


def test_each_process_is_shown_by_itself_as_far_as_it_lives(paths):
    metrics = RequestMetrics(Numbers.of_file(paths[1]))
    found = shown(make_registry(metrics, NoReplicas(), paths))
    assert found["process_resident_memory_bytes", "1"] > 0
    assert ("process_resident_memory_bytes", "0") not in found
    assert not [name for name, *_ in found if name.startswith("python_")]


def test_a_gateway_alone_shows_its_own_process():
    metrics = RequestMetrics()
    metrics.count_disconnect()
    found = shown(make_registry(metrics, NoReplicas(), ()))
    assert found["toka_http_disconnects_total",] == 1
    assert found["process_resident_memory_bytes",] > 0
    assert [name for name, *_ in found if name == "python_info"]


def test_a_file_that_nobody_has_begun_counts_as_zeros(paths):
    paths[0].touch()
    assert counting_process(paths[0]) is None
    assert counting_process(paths[1]) is None
    assert sum(Numbers.sum_of(paths).take(100)) == 0


def test_more_numbers_than_there_are_is_an_error():
    numbers = Numbers()
    with pytest.raises(ValueError, match="there is no room for 1000000 more numbers"):
        numbers.take(1_000_000)


def test_a_full_disk_is_said_at_the_start(paths, monkeypatch):
    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Unavailable, match=r"no room for metrics in .* \(No space left on device\); free some space"):
        Numbers.of_file(paths[0])


def test_a_file_has_all_its_room_from_the_start(paths):
    Numbers.of_file(paths[0])
    found = os.stat(paths[0])
    assert found.st_blocks * 512 >= found.st_size > 0
