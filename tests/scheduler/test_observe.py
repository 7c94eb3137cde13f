"""GetModel, GetLoad, Forecast, ListRequests, CancelRequest, WatchPlans, Tokenize, Detokenize."""

import subprocess
import sys

import grpc
import pytest
from google.rpc import code_pb2
from grpc_status import rpc_status

from services.common.rpc.status import from_status
from services.common.text.encoder import MAX_TEXT_BYTES
from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeReplica
from tests.scheduler.service import PROMPT, session, start, status_of
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2 as o

TOKENS = g.TokenPrompt(token_ids=PROMPT)


async def test_the_model_is_described(service):
    model = (await service.stub.GetModel(o.GetModelRequest())).model
    assert (model.id, model.vocab_size, list(model.eos_token_ids)) == ("tokasaurus-builtin", 2048, [0, 1])
    assert model.max_context_tokens == 2048
    assert model.tokenizer_fingerprint == Tokenizer.load("builtin").fingerprint
    for field in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty"):
        assert model.default_sampling.HasField(field)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.stub.GetModel(o.GetModelRequest(model="x"))
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_counters_count(service):
    await service.generate(tokens=TOKENS, n=3, stopping=g.Stopping(max_tokens=5))
    counters = (await service.load()).counters
    assert counters.requests_accepted == 1
    assert counters.prompt_tokens == 43
    assert counters.generated_tokens == 15
    assert counters.cached_prompt_tokens == 2 * 42
    assert counters.sequences_finished == 3
    assert counters.wasted_tokens == counters.sequences_cancelled == counters.preemptions == 0


async def test_text_becomes_tokens_and_text_again(service):
    ids = (await service.stub.Tokenize(o.TokenizeRequest(text="Hello there"))).token_ids
    assert (await service.stub.Detokenize(o.DetokenizeRequest(token_ids=ids))).text == "Hello there"
    chat = g.ChatPrompt(messages=[g.ChatMessage(role="user", content="Hello")])
    ids = (await service.stub.Tokenize(o.TokenizeRequest(chat=chat))).token_ids
    shown = o.DetokenizeRequest(token_ids=ids, skip_special_tokens=False)
    assert "<|user|>Hello" in (await service.stub.Detokenize(shown)).text
    with pytest.raises(grpc.aio.AioRpcError, match=r"vocabulary"):
        await service.stub.Detokenize(o.DetokenizeRequest(token_ids=[5000]))


def chat_of(text: str) -> g.ChatPrompt:
    return g.ChatPrompt(messages=[g.ChatMessage(role="user", content=text)])


async def test_a_hopeless_prompt_is_refused_without_tokenising_all_of_it(service, monkeypatch):
    seen, tokenizer, text = [], service.server.model.tokenizer, "word " * 200_000
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, *_: seen.append(len(text)) or encode(text))
    monkeypatch.setattr(tokenizer, "encode_batch", lambda *_: pytest.fail("all of it was tokenised"))
    for field, prompt in (("text", {"text": text[:100_000]}), ("chat.messages", {"chat": chat_of(text[:100_000])})):
        request = g.GenerateRequest(**prompt)
        refused = [await status_of(service.stub.Generate(request))]
        with pytest.raises(grpc.aio.AioRpcError) as forecast:
            await service.stub.Forecast(o.ForecastRequest(request=request))
        for error in (*refused, forecast.value):
            found = from_status(rpc_status.from_call(error))
            assert (found.reason, found.field) == ("CONTEXT_LENGTH_EXCEEDED", field)
    refused = await status_of(service.stub.Generate(g.GenerateRequest(text=text)))
    assert from_status(rpc_status.from_call(refused)).reason == "CONTEXT_LENGTH_EXCEEDED"
    assert max(seen) <= 8 * 2048


@pytest.mark.parametrize("field", ["text", "chat.messages"])
async def test_what_is_tokenised_may_be_longer_than_the_context_in_bounds(service, field):
    def tokenize(text: str):
        given = {"text": text} if field == "text" else {"chat": chat_of(text)}
        return service.stub.Tokenize(o.TokenizeRequest(**given))

    assert len((await tokenize("word " * 4000)).token_ids) > 2048
    with pytest.raises(grpc.aio.AioRpcError, match=str(MAX_TEXT_BYTES)) as refused:
        await tokenize("x" * (MAX_TEXT_BYTES + 1))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert from_status(rpc_status.from_call(refused.value)).field == field


async def test_a_forecast_before_and_after_acceptance():
    async with start(FakeShape(page_count=10, max_slots=4)) as service:
        service.worker.hold()
        async with session(service) as client:
            await client.submit(0, tokens=TOKENS, request_id="first", stopping=g.Stopping(max_tokens=80))
            await client.submit(1, tokens=TOKENS, request_id="second", stopping=g.Stopping(max_tokens=80))
            await client.decided(1)
            first = await service.stub.Forecast(o.ForecastRequest(request_id="first", horizon_steps=500))
            second = await service.stub.Forecast(o.ForecastRequest(request_id="second"))
            asked = o.ForecastRequest(request=g.GenerateRequest(tokens=TOKENS, stopping=g.Stopping(max_tokens=80)))
            third = await service.stub.Forecast(asked)
            assert first.start_step < second.start_step < third.start_step
            assert first.finish_step >= 78
            assert first.curve.total_pages == 10
            assert first.curve.steps[0] == 0
            assert max(first.curve.pages) <= 10
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await service.stub.Forecast(o.ForecastRequest(request_id="nobody"))
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            service.worker.release()
            await client.finished(0, 1)
            timed = await service.stub.Forecast(asked)  # steps have been measured
            assert timed.start_step > 0 < timed.start_seconds
            step_s = timed.finish_seconds / timed.finish_step
            assert timed.start_seconds == pytest.approx(timed.start_step * step_s)


def steps_of(forecasts) -> list[tuple[int, int]]:
    return [(each.start_step, each.finish_step) for each in forecasts]


async def list_and_forecast(stub) -> tuple[o.ListRequestsResponse, list[o.ForecastResponse]]:
    """Return the list of requests and the forecast of each, with no plan between them."""
    for _ in range(100):
        first, asked, last = (
            await stub.ListRequests(o.ListRequestsRequest(horizon_steps=500)),
            [await stub.Forecast(o.ForecastRequest(request_id=name)) for name in ("runs", "waits")],
            await stub.ListRequests(o.ListRequestsRequest(horizon_steps=500)),
        )
        if steps_of(first.requests) == steps_of(last.requests):
            return first, asked
    raise AssertionError("the scheduler sends plans although the worker holds its results")


async def test_everything_unfinished_is_listed_with_its_end():
    async with start(FakeShape(page_count=12, max_slots=4)) as service:
        service.worker.hold()
        async with session(service) as client:
            fields = {"tokens": TOKENS, "stopping": g.Stopping(max_tokens=80)}
            await client.submit(0, request_id="runs", n=2, fairness_key="team", **fields)
            await client.submit(2, request_id="waits", priority=g.PRIORITY_CLASS_LOW, **fields)
            await client.decided(2)
            seen, asked = await list_and_forecast(service.stub)
            runs, waits = seen.requests
            assert (runs.request_id, runs.fairness_key, runs.priority) == ("runs", "team", g.PRIORITY_CLASS_NORMAL)
            assert (runs.running_samples + runs.waiting_samples, runs.finished_samples) == (2, 0)
            assert (runs.prompt_tokens, runs.max_tokens) == (43, 80)
            assert (waits.request_id, waits.priority) == ("waits", g.PRIORITY_CLASS_LOW)
            assert (waits.running_samples, waits.waiting_samples) == (0, 1)
            assert steps_of(seen.requests) == steps_of(asked)
            assert waits.start_step >= runs.finish_step
            assert max(seen.curve.pages) <= seen.curve.total_pages == 12
            assert (seen.unfinished_requests, seen.curve.steps[0]) == (2, 0)
            some = await service.stub.ListRequests(o.ListRequestsRequest(most=1))
            assert [each.request_id for each in some.requests] == ["runs"]
            assert (some.unfinished_requests, len(some.curve.steps)) == (2, 0)
            for wrong in ({"most": 1001}, {"horizon_steps": 70000}):
                with pytest.raises(grpc.aio.AioRpcError, match=r"expected 0 to"):
                    await service.stub.ListRequests(o.ListRequestsRequest(**wrong))
            service.worker.release()
            await client.finished(0, 1, 2)
        assert not (await service.stub.ListRequests(o.ListRequestsRequest())).requests


async def test_a_request_of_somebody_else_is_cancelled_running_waiting_or_in_part():
    """Its client is told who ended it; what it held is free; others notice nothing."""
    async with start(FakeShape(page_count=12, max_slots=2)) as service:
        service.worker.hold()
        async with session(service) as client:
            fields = {"tokens": TOKENS, "stopping": g.Stopping(max_tokens=40, ignore_eos=True)}
            for handle, (name, n) in enumerate({"runs": 1, "stays": 1, "waits": 3}.items()):
                await client.submit(handle, request_id=name, n=n, **fields)
            await client.decided(2)
            for name, samples in (("runs", 1), ("waits", 3)):
                asked = o.CancelRequestRequest(request_id=name)
                assert (await service.stub.CancelRequest(asked)).samples == samples
                with pytest.raises(grpc.aio.AioRpcError) as refused:  # it has ended
                    await service.stub.CancelRequest(asked)
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            await client.finished(0, 2, 3, 4)
            for handle in (0, 2, 3, 4):
                finish = client.samples[handle].finish
                assert (finish.reason, finish.error.code) == (g.FINISH_REASON_CANCELLED, code_pb2.CANCELLED)
                assert from_status(finish.error).reason == "CANCELLED_BY_OPERATOR"
            service.worker.release()
            await client.finished(1)
            assert client.samples[1].finish.reason == g.FINISH_REASON_LENGTH
            assert len(client.samples[1].tokens) == 40
        load = await service.until_load(lambda load: not load.in_use_pages)
        assert load.counters.sequences_cancelled == 4
        call = service.stub.Generate(g.GenerateRequest(request_id="direct", **fields))
        service.worker.hold()
        assert (await call.read()).HasField("accepted")
        assert (await service.stub.CancelRequest(o.CancelRequestRequest(request_id="direct"))).samples == 1
        reasons = []
        while (news := await call.read()) is not grpc.aio.EOF:
            reasons += [each.finish.reason for each in news.outputs.samples if each.HasField("finish")]
        assert reasons == [g.FINISH_REASON_CANCELLED]
        assert await call.code() is grpc.StatusCode.OK
        service.worker.release()
        await service.until_load(lambda load: not load.in_use_pages)


@pytest.mark.parametrize("request_id", ["", "x" * 5000, "x" * 300_000])
async def test_an_id_that_nothing_has_is_not_found_however_long_it_is(service, request_id):
    """What a call ends with may be 8 KiB long."""
    for call in (
        service.stub.CancelRequest(o.CancelRequestRequest(request_id=request_id)),
        service.stub.Forecast(o.ForecastRequest(request_id=request_id)),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=r"no unfinished request has the id") as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_plans_can_be_watched(service):
    call = service.stub.WatchPlans(o.WatchPlansRequest())
    async with session(service) as client:
        # The watcher is there once a plan of some request reaches it.
        handle = 0
        while not service.server.engine.watchers:
            await client.submit(handle, tokens=TOKENS, stopping=g.Stopping(max_tokens=1))
            await client.finished(handle)
            handle += 1
        await client.submit(handle, tokens=TOKENS, request_id="seen", stopping=g.Stopping(max_tokens=3))
        await client.finished(handle)
    seen = []
    while not any("seen" in plan.admitted_request_ids for plan in seen):
        seen.append(await call.read())
    assert seen[-1].sequences == 1
    assert seen[-1].prefill_tokens == seen[-1].tokens
    assert (seen[-1].micro_batches, seen[-1].hydragen_groups) == (1, 0)
    assert not seen[-1].preempted_request_ids
    call.cancel()


async def test_watched_plans_and_counters_show_hydragen_groups_and_micro_batches():
    flags = {"use_hydragen": True, "hydragen_min_group_size": 8, "pp_size": 2, "pp_num_buffer_stages": 0}
    async with start(replica=FakeReplica(pp_size=2), **flags) as service:
        call = service.stub.WatchPlans(o.WatchPlansRequest())
        while not service.server.engine.watchers:
            await service.generate(tokens=TOKENS, stopping=g.Stopping(max_tokens=1))
        prompt = g.TokenPrompt(token_ids=[60] * 1024)
        await service.generate(tokens=prompt, n=128, stopping=g.Stopping(max_tokens=30))
        counters = (await service.load()).counters
        plans = [await call.read()]
        while plans[-1].step < counters.steps:
            plans.append(await call.read())
        call.cancel()
        grouped = [plan for plan in plans if plan.hydragen_groups]
        assert grouped
        assert all(8 <= plan.hydragen_rows <= plan.sequences for plan in grouped)
        assert {plan.micro_batches for plan in plans} == {2}
        assert sum(plan.hydragen_rows for plan in plans) == counters.hydragen_rows < counters.batch_rows


def test_neither_torch_nor_another_service_is_loaded():
    code = (
        "import sys, services.scheduler.server\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')"
        " or m.startswith(('services.gateway', 'services.worker', 'services.launcher'))]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_core_knows_no_wire_and_no_clock():
    code = (
        "import sys, services.scheduler.core.scheduler\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('grpc', 'tokasaurus', 'google')]\n"
        "sys.exit(repr(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
