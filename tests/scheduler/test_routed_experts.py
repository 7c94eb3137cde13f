"""Experts of tokens on both forms of the contract: complete and without repetition, whatever happens to a sample."""

import numpy as np
import pytest

from services.common.errors import InvalidRequest
from services.common.rpc.status import from_rpc_error
from services.scheduler.api import validation
from tests.fakes.experts import LAYERS, LAYOUT, PER_TOKEN, fake_experts
from tests.fakes.model import FakeShape
from tests.fakes.worker import FakeReplica
from tests.scheduler.service import PROMPT, Sample, session, start
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2 as o
from tokasaurus.scheduler.v1 import session_pb2 as s

SHAPE = FakeShape(routed_experts=True)


def fields(max_tokens: int = 20, start: int = 0, prompt: list[int] = PROMPT, **more) -> dict:
    return {
        "tokens": g.TokenPrompt(token_ids=prompt),
        "sampling": g.Sampling(seed=3),
        "stopping": g.Stopping(max_tokens=max_tokens, ignore_eos=True),
        "output": g.Output(routed_experts=True, routed_experts_start=start),
        **more,
    }


def check(sample: Sample, begin: int = 0, prompt: list[int] = PROMPT) -> None:
    """Every token but the last has its experts, once, in order."""
    position, found = begin, b""
    for first, experts in sample.experts:
        assert first == position
        assert len(experts) % (LAYERS * PER_TOKEN) == 0
        position += len(experts) // (LAYERS * PER_TOKEN)
        found += experts
    expected = fake_experts(prompt + sample.tokens[:-1], begin)
    np.testing.assert_array_equal(np.frombuffer(found, np.uint8).reshape(expected.shape), expected)


@pytest.fixture
async def service():
    async with start(SHAPE) as running:
        yield running


async def test_the_model_says_how_to_read_experts(service):
    model = (await service.stub.GetModel(o.GetModelRequest())).model
    assert {name: getattr(model.routed_experts, name) for name in LAYOUT} == LAYOUT


@pytest.mark.parametrize("length", [1, 16, 17, 43])
@pytest.mark.parametrize("n", [1, 5])
async def test_every_sample_has_the_experts_of_its_prompt_and_of_its_answer(service, n, length):
    prompt = PROMPT[:length]
    for _ in range(2):  # the second time the prefix is cached
        samples = await service.generate(n=n, **fields(prompt=prompt))
        assert len(samples) == n
        for sample in samples.values():
            check(sample, prompt=prompt)


@pytest.mark.parametrize("begin", [0, 5, 42, 43])
async def test_experts_begin_where_the_request_says(service, begin):
    for sample in (await service.generate(n=2, **fields(start=begin))).values():
        check(sample, begin)


async def test_a_prompt_in_chunks_beside_requests_that_do_not_ask():
    async with start(FakeShape(routed_experts=True, max_tokens_per_step=24)) as service, session(service) as client:
        await client.submit(0, **fields(n=3))
        await client.submit(10, **fields() | {"output": g.Output()})
        await client.submit(20, **fields(prompt=PROMPT * 3))
        await client.finished(0, 1, 2, 10, 20)
        for handle in (0, 1, 2):
            check(client.samples[handle])
        check(client.samples[20], prompt=PROMPT * 3)
        assert not client.samples[10].experts


async def test_a_request_that_does_not_ask_gets_no_experts(service):
    samples = await service.generate(n=2, **fields() | {"output": g.Output()})
    assert not any(sample.experts for sample in samples.values())


async def test_experts_are_complete_after_preemptions():
    kind = {"length_class": "kind", "admission": g.ADMISSION_MODE_PREDICTED}
    async with start(FakeShape(routed_experts=True, page_count=24, max_slots=16), admission_margin=0) as service:
        short = g.Stopping(max_tokens=160, token_ids=range(SHAPE.vocab_size))
        await service.generate(n=64, **fields(**kind) | {"stopping": short})
        samples = await service.generate(n=8, **fields(160, **kind))
        assert (await service.load()).counters.preemptions
        for sample in samples.values():
            assert len(sample.tokens) == 160
            check(sample)


async def test_experts_are_complete_after_the_loss_of_the_worker(service):
    async with session(service) as client:
        await service.begin(client, **fields(40, n=3))
        service.worker.crash()
        service.release()
        await client.finished(0, 1, 2)
        for handle in range(3):
            assert len(client.samples[handle].tokens) == 40
            check(client.samples[handle])


async def test_a_sample_that_is_ended_has_the_experts_of_its_tokens(service):
    async with session(service) as client:
        await service.begin(client, **fields(500))
        await client.send(end=s.End(handles=[0]))
        await client.send(heartbeat=s.Heartbeat(nonce=1))
        await client.until(lambda message: message.HasField("heartbeat"))
        service.release()
        await client.finished(0)
        assert client.samples[0].finish.reason == g.FINISH_REASON_ABORTED
        check(client.samples[0])


async def test_a_resumed_sample_sends_the_rest(service):
    whole = (await service.generate(**fields()))[0]
    begun = whole.tokens[:7]
    prompt = [*PROMPT, *begun]
    known = len(prompt) - 1
    rest = (await service.generate(resume=g.Resume(generated_tokens=7), **fields(start=known, prompt=prompt)))[0]
    assert rest.tokens == whole.tokens[7:]
    check(rest, known, prompt)


async def test_one_rank_of_several_reports_experts():
    async with start(replica=FakeReplica(SHAPE, tp_size=2)) as service:
        for sample in (await service.generate(n=3, **fields())).values():
            check(sample)


@pytest.mark.parametrize(
    ("shape", "output", "message", "field"),
    [
        (FakeShape(), {"routed_experts": True}, "start the worker .* with return_routed_experts=T", "routed_experts"),
        (SHAPE, {"routed_experts_start": 3}, "routed_experts_start needs routed_experts", "routed_experts_start"),
        (
            *(SHAPE, {"routed_experts": True, "routed_experts_start": 44}),
            *("routed_experts_start is 44: expected at most 43", "routed_experts_start"),
        ),
        (SHAPE, {"routed_experts": True}, "set routed_experts_start to at least 18", "routed_experts_start"),
    ],
)
async def test_requests_that_cannot_be_served_are_refused(shape, output, message, field, monkeypatch):
    monkeypatch.setattr(validation, "_MOST_ROUTED_BYTES", 100)
    async with start(shape) as service:
        call = service.stub.Generate(g.GenerateRequest(**fields() | {"output": g.Output(**output)}))
        with pytest.raises(Exception, match=message) as caught:
            [_ async for _ in call]
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == f"output.{field}"
