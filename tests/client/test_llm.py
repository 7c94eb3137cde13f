"""Prompts to answers in a script: against a real scheduler and the fake worker."""

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from services.client import LLM, SamplingParams
from services.common.errors import InvalidRequest, Unavailable
from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeShape, chosen_logprob, continuation, top_token_ids
from tests.gateway.deployment import BOOT_S, PATIENCE_S, Deployment, eventually, free_port
from tests.gateway.replicas import Engines

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load("builtin")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """Random tokens, never an end of sequence by itself."""
    running = Deployment(tmp_path_factory.mktemp("deployment")).wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def llm(deployment):
    with LLM(address=deployment.scheduler_address) as made:
        yield made


@contextmanager
def engine(directory: Path, **flags) -> Iterator[Engines]:
    """A scheduler and its worker, ready, to slow down or to break."""
    engines = Engines(directory, 1, **flags)
    try:
        eventually(lambda: engines.load().ready, BOOT_S)
        yield engines
    finally:
        engines.stop()


def expected(prompt: list[int], count: int, **more) -> list[int]:
    return continuation(FakeShape(), prompt, count, **more)


def test_many_prompts_are_answered_in_their_order(llm, tokenizer):
    prompts = [f"Question {number}:" for number in range(500)]
    outputs = llm.generate(prompts, SamplingParams(seed=3, max_tokens=8))
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert output.error is None
        assert output.prompt_token_ids == tokenizer.encode(output.prompt)
        [sample] = output.outputs
        assert sample.token_ids == expected(output.prompt_token_ids, 8, seed=3)
        assert sample.text == output.text == tokenizer.vocabulary.text_bytes(sample.token_ids).decode(errors="replace")
        assert (sample.index, sample.finish_reason, sample.logprobs) == (0, "length", None)
        assert output.usage.prompt_tokens == len(output.prompt_token_ids)
        assert output.usage.completion_tokens == 8


def test_prompts_may_be_one_or_token_ids(llm, tokenizer):
    ids = tokenizer.encode("Tom has 3 apples")
    params = SamplingParams(temperature=0, max_tokens=4)
    [alone] = llm.generate("Tom has 3 apples", params)
    for prompts in (ids, [ids], [np.array(ids)], np.array(ids)):
        [output] = llm.generate(prompts, params)
        assert output.outputs == alone.outputs
        assert output.prompt is None
    assert llm.generate([], params) == []
    assert len(llm.generate("x")[0].outputs[0].token_ids) == 16


def test_an_answer_is_the_one_of_http(llm, deployment):
    same = {"n": 3, "seed": 7, "max_tokens": 12, "temperature": 0.7, "min_p": 0.1, "stop": ["zzz"], "logprobs": 2}
    [output] = llm.generate(["x"], SamplingParams(**same))
    choices = deployment.complete(prompt="x", return_token_ids=True, **same).json()["choices"]
    assert [sample.index for sample in output.outputs] == [0, 1, 2]
    assert [sample.text for sample in output.outputs] == [choice["text"] for choice in choices]
    assert [sample.token_ids for sample in output.outputs] == [choice["token_ids"] for choice in choices]
    for sample, choice in zip(output.outputs, choices, strict=True):
        values = [entry.logprob for entry in sample.logprobs]
        assert values == pytest.approx(choice["logprobs"]["token_logprobs"])
        assert values == pytest.approx(chosen_logprob(np.array(sample.token_ids)))
        assert sample.cumulative_logprob == pytest.approx(sum(values))
        tops = [entry.top_ids for entry in sample.logprobs]
        assert tops == [list(top_token_ids(token, 2, 2048)) for token in sample.token_ids]


def test_log_probabilities_of_a_prompt(llm, deployment):
    [output] = llm.generate(["Tom has 3"], SamplingParams(prompt_logprobs=1, max_tokens=1))
    choice = deployment.complete(prompt="Tom has 3", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    assert output.prompt_logprobs == choice["prompt_logprobs"]


def test_equal_prompts_get_noise_of_their_own(llm):
    params = SamplingParams(seed=1, max_tokens=10)
    first, second = llm.generate(["x", "x"], params)
    assert first.text == llm.generate("x", params)[0].text != second.text


def test_each_prompt_may_have_its_own_parameters(llm):
    outputs = llm.generate(["x", "y"], [SamplingParams(max_tokens=3), SamplingParams(max_tokens=5, n=2)])
    assert [[len(sample.token_ids) for sample in output.outputs] for output in outputs] == [[3], [5, 5]]
    with pytest.raises(InvalidRequest, match="1 for 2 prompts"):
        llm.generate(["x", "y"], [SamplingParams()])


@pytest.mark.parametrize("bad", ["x " * 5000, "bad \udce9", [], [5, 99_999], [1.5, 2], ["x"], [-1], [1, [2, 3]]])
def test_a_prompt_that_cannot_be_answered_leaves_the_others_alone(llm, bad):
    first, wrong, last = llm.generate(["a", bad, "b"], SamplingParams(max_tokens=2))
    assert len(first.outputs) == len(last.outputs) == 1
    assert wrong.outputs == []
    assert (isinstance(wrong.error, InvalidRequest), wrong.error.field) == (True, "prompt")
    with pytest.raises(InvalidRequest):
        wrong.text  # noqa: B018


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1), ("top_p", 2), ("n", 0), ("max_tokens", -3), ("stop", [""]), ("seed", "x"),
        ("logit_bias", {1: 1000}), ("logit_bias", {"x": "y"}), ("truncate_prompt_tokens", 0), ("min_p", object()),
        ("stop", 5), ("stop", b"x"), ("stop_token_ids", 5), ("stop_token_ids", {1: 2}), ("logit_bias", [1]),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named_when_it_is_made(field, value):
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field) or not caught.value.field


def test_none_is_the_default_of_stops():
    assert SamplingParams(stop=None, stop_token_ids=None, logit_bias=None).body == SamplingParams().body
    assert SamplingParams(stop=(), stop_token_ids=np.array([5])).body.stop_token_ids == [5]


@pytest.mark.parametrize(
    ("field", "value"),
    [("logprobs", 21), ("stop_token_ids", [5000]), ("logit_bias", {5000: 1}), ("truncate_prompt_tokens", 2048)],
)
def test_what_depends_on_the_model_is_named_when_it_is_used(llm, field, value):
    with pytest.raises(InvalidRequest) as caught:
        llm.generate(["x"], SamplingParams(**{field: value}))
    assert caught.value.field == field


def test_as_much_of_a_prompt_may_count_as_there_is_room_for(llm):
    [cut] = llm.generate([[5] * 3000], SamplingParams(truncate_prompt_tokens=-1, max_tokens=8))
    assert len(cut.prompt_token_ids) == 2040
    [short] = llm.generate([[5] * 3], SamplingParams(truncate_prompt_tokens=-1, max_tokens=8))
    assert short.prompt_token_ids == [5] * 3


def test_answers_may_have_to_match_a_grammar(llm):
    choice = SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=20)
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}
    broken = SamplingParams(structured_outputs={"regex": "("})
    outputs = llm.generate(["x", "y", "z"], [choice, SamplingParams(response_format=schema, max_tokens=20), broken])
    assert outputs[0].text in ("yes", "no")
    assert type(json.loads(outputs[1].text)) is bool
    assert outputs[2].error.field == "structured_outputs"
    with pytest.raises(InvalidRequest, match="response_format"):
        list(llm.stream("x", SamplingParams(response_format={"type": "poem"})))
    with pytest.raises(InvalidRequest) as caught:
        list(llm.stream("x", broken))
    assert caught.value.field == "structured_outputs"


def test_a_conversation_is_answered_as_over_http(llm, deployment):
    more = [
        *CHAT,
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": [{"type": "text", "text": "Go"}]},
    ]
    outputs = llm.chat([CHAT, more], SamplingParams(seed=2, max_tokens=6))
    for messages, output in zip((CHAT, more), outputs, strict=True):
        choice = deployment.chat(messages=messages, seed=2, max_tokens=6).json()["choices"][0]
        assert output.text == choice["message"]["content"]
    [alone] = llm.chat(CHAT, SamplingParams(seed=2, max_tokens=6))
    assert alone.outputs == outputs[0].outputs
    [longest] = llm.chat(CHAT, SamplingParams(stop_token_ids=alone.outputs[0].token_ids[3:4], seed=2))
    assert longest.outputs[0].token_ids == alone.outputs[0].token_ids[:4]
    assert longest.outputs[0].finish_reason == "stop"


def test_a_wrong_conversation_is_an_error_of_its_own(llm):
    wrong = [
        [{"role": "wizard", "content": "x"}],
        [{"role": "user"}],
        [],
        "Hi",
        [{"role": "user", "content": object()}],
    ]
    outputs = llm.chat([CHAT, *wrong], SamplingParams(max_tokens=1))
    assert [output.error is None for output in outputs] == [True, *[False] * len(wrong)]
    assert outputs[1].error.field == "messages[0].role"
    [strange] = llm.chat(CHAT, chat_template_kwargs={"mood": "good"})
    assert strange.error.field == "chat_template_kwargs.mood"


def test_a_stream_says_what_a_whole_answer_says(llm):
    params = SamplingParams(n=2, seed=5, max_tokens=40, logprobs=0)
    [whole] = llm.generate("x", params)
    told = list(llm.stream("x", params))
    for sample in whole.outputs:
        mine = [output for output in told if output.index == sample.index]
        assert "".join(output.text for output in mine) == sample.text
        assert [token for output in mine for token in output.token_ids] == sample.token_ids
        assert [entry for output in mine for entry in output.logprobs] == sample.logprobs
        assert [output.finish_reason for output in mine if output.finish_reason] == ["length"]
    assert "".join(output.text for output in llm.stream(CHAT, SamplingParams(seed=2, max_tokens=6))) == (
        llm.chat(CHAT, SamplingParams(seed=2, max_tokens=6))[0].text
    )
    with pytest.raises(InvalidRequest, match="context"):
        list(llm.stream("x " * 5000))


def test_a_stream_that_is_left_is_cancelled(tmp_path):
    with engine(tmp_path, worker={"step_ms": 5}) as slow, LLM(address=slow.addresses[0]) as llm:
        stream = llm.stream("x", SamplingParams(max_tokens=2000))
        assert next(stream).token_ids
        eventually(lambda: slow.load().running_sequences == 1)
        stream.close()
        eventually(lambda: slow.load().running_sequences == 0)


async def test_a_caller_may_have_a_running_event_loop(llm):
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].error is None
    assert len(list(llm.stream("x", SamplingParams(max_tokens=2)))) > 0


def test_many_threads_may_ask_at_once(llm):
    with ThreadPoolExecutor(8) as threads:
        texts = list(
            threads.map(lambda seed: llm.generate("x", SamplingParams(seed=seed, max_tokens=6))[0].text, range(40))
        )
    assert texts == [llm.generate("x", SamplingParams(seed=seed, max_tokens=6))[0].text for seed in range(40)]


@pytest.mark.slow
def test_a_scheduler_that_comes_back_gets_its_prompts_again(tmp_path):
    with engine(tmp_path, worker={"step_ms": 5}) as fragile, LLM(address=fragile.addresses[0]) as llm:
        outputs = []
        prompts = [f"Question {number}" for number in range(20)]
        params = SamplingParams(seed=1, max_tokens=300)
        asking = threading.Thread(target=lambda: outputs.extend(llm.generate(prompts, params)))
        asking.start()
        eventually(lambda: fragile.load().running_sequences > 0)
        fragile.schedulers[0].kill()
        fragile.schedulers[0].start()
        asking.join()
        assert [output.prompt for output in outputs] == prompts
        for output in outputs:
            assert output.outputs[0].token_ids == expected(output.prompt_token_ids, 300, seed=1)


@pytest.mark.slow
def test_each_loss_is_waited_out_by_itself(tmp_path, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    times = SimpleNamespace(monotonic=lambda: clock.now, perf_counter=time.perf_counter)
    monkeypatch.setattr("services.gateway.engine.failover.time", times)
    with (
        engine(tmp_path, worker={"step_ms": 5}) as fragile,
        LLM(address=fragile.addresses[0], patience_s=600) as llm,
        ThreadPoolExecutor() as threads,
    ):
        asked = threads.submit(llm.generate, "x", SamplingParams(max_tokens=400))
        for _ in range(2):
            eventually(lambda: fragile.load().running_sequences == 1)
            clock.now += 10_000
            fragile.schedulers[0].kill()
            fragile.schedulers[0].start()
        [output] = asked.result(PATIENCE_S)
        assert output.error is None


@pytest.mark.slow
def test_a_stream_waits_for_room_in_a_full_queue(tmp_path):
    with (
        engine(tmp_path, worker={"step_ms": 5, "max_slots": 1}, max_queued_sequences=1) as small,
        LLM(address=small.addresses[0]) as llm,
        ThreadPoolExecutor() as threads,
    ):
        running = llm.stream("x", SamplingParams(max_tokens=2000))
        next(running)
        threads.submit(llm.generate, "x", SamplingParams(max_tokens=2))
        eventually(lambda: small.load().waiting_sequences == 1)
        waiting = threads.submit(lambda: list(llm.stream("x", SamplingParams(max_tokens=3))))
        eventually(lambda: small.load().counters.requests_rejected > 0)
        running.close()
        assert sum(len(piece.token_ids) for piece in waiting.result(PATIENCE_S)) == 3


@pytest.mark.slow
def test_a_scheduler_that_stays_away_is_not_waited_for_for_ever(tmp_path):
    with engine(tmp_path) as fragile, LLM(address=fragile.addresses[0], patience_s=0.5) as llm:
        fragile.schedulers[0].kill()
        [lost] = llm.generate("x")
        assert type(lost.error) is Unavailable
        with pytest.raises(Unavailable):
            next(llm.stream("x"))


def test_a_bar_shows_how_far_it_is(llm, monkeypatch):
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    llm.generate(["x", "y", "z " * 5000], SamplingParams(max_tokens=5), progress=True)
    assert "3/3" in shown.getvalue()
    assert "10 tokens, 1 failed" in shown.getvalue()


def test_an_address_that_nobody_has_is_told(monkeypatch):
    monkeypatch.setattr("services.client.runner.CONNECT_S", 1.0)
    with pytest.raises(Unavailable, match="no scheduler is ready"):
        LLM(address=f"127.0.0.1:{free_port()}")


def test_what_does_not_go_with_an_address_is_named():
    with pytest.raises(InvalidRequest, match="dp_size=2"):
        LLM(address="127.0.0.1:1", dp_size=2)
    with pytest.raises(InvalidRequest, match="gateway's URL"):
        LLM(address="http://127.0.0.1:1")


def test_certificates_go_with_an_address(tmp_path):
    for given, words in (
        ({"grpc_cert": "c"}, "flag grpc_cert=c: has no effect without grpc_key="),
        ({"grpc_ca": tmp_path / "none"}, f"flag grpc_ca={tmp_path}/none: cannot be read"),
        ({"grpc_token_file": tmp_path / "none"}, f"flag grpc_token_file={tmp_path}/none: cannot be read"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            LLM(address="127.0.0.1:1", **given)


def test_a_closed_one_says_so(deployment, monkeypatch):
    llm = LLM(address=deployment.scheduler_address)
    assert llm.model
    assert llm.max_context_tokens == 2048
    with monkeypatch.context() as patched:
        patched.setattr(os, "getpid", lambda: -1)
        with pytest.raises(RuntimeError, match="another process"):
            llm.generate("x")
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


def test_what_runs_when_it_is_closed_ends_with_an_error(tmp_path):
    with engine(tmp_path, worker={"step_ms": 20}) as slow:
        llm = LLM(address=slow.addresses[0])
        caught: list[BaseException] = []

        def ask() -> None:
            caught.extend(output.error for output in llm.generate(["x"], SamplingParams(max_tokens=2000)))

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: slow.load().running_sequences > 0)
        llm.close()
        asking.join()
        assert type(caught[0]) is Unavailable


def test_prompts_that_are_not_sent_yet_end_with_an_error_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr("services.client.runner.OUTSTANDING", 8)
    monkeypatch.setattr("services.client.runner.AT_ONCE", 16)
    with engine(tmp_path, worker={"step_ms": 20}) as slow:
        llm = LLM(address=slow.addresses[0])
        told: list[BaseException | None] = []

        def ask() -> None:
            outputs = llm.generate([f"Question {number}" for number in range(200)], SamplingParams(max_tokens=1000))
            told.extend(output.error for output in outputs)

        threads = [threading.Thread(target=work, daemon=True) for work in (ask, llm.close)]
        threads[0].start()
        eventually(lambda: slow.load().running_sequences > 0)
        threads[1].start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "it waits for what never comes"
        assert [type(error) for error in told] == [Unavailable] * 200
