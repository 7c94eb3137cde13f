"""The client and the watcher of the benchmarks: they count what happened, and a failure is never an answer."""

from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest

from bench import latency
from bench.gpus import Gpus
from bench.send import failures, send_all
from bench.server import free_port
from bench.target import Target, TargetConfig, ratios
from bench.watch import Sample, read_metrics, steady, summary
from services.cli.bench.exchange import Reply
from services.common.flags import FlagError, build


def body(**fields):
    return {"model": "tokasaurus-builtin", "prompt": [5, 6, 7], "max_tokens": 6, "ignore_eos": True, **fields}


@pytest.mark.slow
@pytest.mark.parametrize("clients", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_replies_come_in_the_order_of_the_requests(builtin_server, clients):
    bodies = [body(max_tokens=count) for count in (3, 9, 5)]
    # Long enough that its first and its last text cannot arrive together.
    bodies.append(body(max_tokens=200, stream=True, stream_options={"include_usage": True}))
    replies = send_all(f"{builtin_server.base_url}/v1/completions", bodies, clients)
    assert [reply.completion_tokens for reply in replies] == [3, 9, 5, 200]
    assert all(reply.prompt_tokens == 3 and not reply.error for reply in replies)
    assert all(reply.sent_at < reply.first_at <= reply.last_at <= reply.ended_at for reply in replies)
    assert replies[3].first_at < replies[3].last_at


@pytest.mark.slow
def test_a_refused_request_and_a_missing_server_are_failures(builtin_server, capsys):
    refused = send_all(f"{builtin_server.base_url}/v1/completions", [body(max_tokens=-1), body()])
    assert [bool(reply.error) for reply in refused] == [True, False]
    assert "max_tokens" in refused[0].error
    missing = send_all(f"http://127.0.0.1:{free_port()}/v1/completions", [body()])
    assert failures(missing) == 1
    assert "cannot connect" in capsys.readouterr().out


def test_answers_that_come_as_one_text_take_no_time_per_token(monkeypatch, capsys):
    reply = Reply(sent_at=1.0, first_at=1.5, last_at=1.5, ended_at=1.6, prompt_tokens=4, completion_tokens=2)
    monkeypatch.setattr(latency, "measure_round", lambda *_: [reply])
    figures = latency.measure(build(latency.LatencyConfig, {"concurrent": "1"}), Target("here", "http://host", "model"))
    assert (figures["1"]["per_token_ms"], figures["1"]["first_token_ms"]) == (0, 500)
    assert "inf" in capsys.readouterr().out


def test_metrics_are_summed_over_their_labels():
    text = '# HELP a b\n# TYPE a counter\na{replica="x y"} 1.5\na{replica="z"} 2\nb 1e3\n'
    assert read_metrics(text) == {"a": 3.5, "b": 1000.0}


def sample(at: float, running: float, tokens: float) -> Sample:
    metrics = {"toka_num_requests_running": running, "toka_generation_tokens_total": tokens, "toka_steps_total": at}
    return Sample(at, metrics, {"gateway": at / 4})


def test_the_steady_state_is_what_lies_between_the_first_and_the_last_full_sample():
    samples = [sample(0, 0, 0), sample(1, 98, 50), sample(2, 100, 150), sample(3, 97, 250), sample(4, 20, 260)]
    found = summary(steady(samples))
    assert found["tokens_per_second"] == 100
    assert found["ms_per_step"] == 1000
    assert found["cores_gateway"] == 0.25
    assert steady([sample(0, 0, 0), sample(1, 0, 0)]) == []
    assert summary([]) == {}
    assert "joules_per_token" not in found
    measured = [replace(each, joules=300.0 * each.at) for each in samples]
    assert summary(steady(measured))["joules_per_token"] == 3


def test_energy_and_memory_are_those_of_all_visible_gpus():
    def refuse(handle: int) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    counting = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=["GPU-a", "GPU-b"].index,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 1000 + 500 * handle,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=1 + handle, total=4),
    )
    gpus = Gpus(counting, ["0", "GPU-b"])
    assert (gpus.joules(), gpus.free_share()) == (2.5, 0.5)
    counting.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert gpus.joules() is None


def test_a_baseline_is_a_name_and_a_figure(capsys):
    config = build(TargetConfig, {"baseline": "h200,mine:10.5,http://host:3"})
    assert config.baselines("latency-1") == {"tokasaurus-0.0.4": 2.12, "vllm-0.26.0": 1.36, "mine": 10.5,
                                             "http://host": 3}  # fmt: skip
    assert ratios(5.0, {"mine": 10.0}, lower_is_better=True) == {"mine": 2.0}
    assert "2.00 times as good as mine (10)" in capsys.readouterr().out
    with pytest.raises(FlagError, match="neither name:figure nor h200"):
        build(TargetConfig, {"baseline": "mine"})
