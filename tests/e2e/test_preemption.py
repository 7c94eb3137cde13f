"""A real worker and a cache far too small for what is asked: sequences are preempted, and answers are the same."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from bench.server import Server, serve
from services.common.text.tokenizer import Tokenizer
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

pytestmark = pytest.mark.slow

SHORT, LONG = 40, 12
LIMIT = 120  # of both: what is learnt from the short answers is expected of the long ones
FLAGS = {"device": "cpu", "dtype": "float32", "admission_margin": 0}
WALK = {"type": "array", "items": {"enum": ["left", "right", "up", "down"]}, "minItems": 20, "maxItems": 20}
KINDS = {
    "plain": g.GenerateRequest(sampling=g.Sampling(temperature=0), stopping=g.Stopping(ignore_eos=True)),
    "greedy grammar": g.GenerateRequest(
        sampling=g.Sampling(temperature=0, grammar=g.Grammar(json_schema=json.dumps(WALK))),
        output=g.Output(logprobs=True, top_logprobs=2),
    ),
    "seeded grammar": g.GenerateRequest(
        sampling=g.Sampling(temperature=1, seed=5, grammar=g.Grammar(json_schema=json.dumps(WALK))),
        output=g.Output(logprobs=True, top_logprobs=2),
        n=2,
    ),
}  # fmt: skip


@dataclass
class Sample:
    """What a client is told of one."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)  # two for each token
    reason: int | None = None


def prompt(number: int) -> str:
    return f"Question: Tom has {number + 2} apples and buys {3 * number + 1} more. How many does he have?\nAnswer:"


async def answer(stub, number: int, kind: str, asked: g.GenerateRequest) -> list[Sample]:
    """The samples of a request like ``asked``, whose length is predicted from what ``kind`` had before."""
    request = g.GenerateRequest(text=prompt(number), admission=g.ADMISSION_MODE_PREDICTED, length_class=kind)
    request.MergeFrom(asked)
    request.stopping.max_tokens = LIMIT
    samples = [Sample() for _ in range(max(1, asked.n))]
    async for response in stub.Generate(request):
        for told in response.outputs.samples:
            sample = samples[told.sample_index]
            sample.tokens += told.token_ids
            sample.text += told.text
            sample.logprobs += told.logprobs.chosen
            sample.top_logprobs += told.logprobs.top_logprobs
            if told.HasField("finish"):
                sample.reason = told.finish.reason
    return samples


async def ask(server: Server, kind: str) -> tuple[list[Sample], observe_pb2.Counters, observe_pb2.Counters]:
    """Many short answers, then long ones of the same class; returns the long ones, and the counters around them."""
    brief = g.GenerateRequest(sampling=g.Sampling(temperature=0), stopping=g.Stopping(strings=[" "]))
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def counters() -> observe_pb2.Counters:
            return (await stub.GetLoad(observe_pb2.GetLoadRequest())).load.counters

        for start in range(0, SHORT, 8):
            await asyncio.gather(*(answer(stub, start + index, kind, brief) for index in range(8)))
        before = await counters()
        answers = await asyncio.gather(*(answer(stub, index, kind, with_bias(KINDS[kind])) for index in range(LONG)))
        return [sample for samples in answers for sample in samples], before, await counters()


def with_bias(asked: g.GenerateRequest) -> g.GenerateRequest:
    """Against blanks, where there is a grammar: the model likes them, and would walk nowhere."""
    told = g.GenerateRequest()
    told.CopyFrom(asked)
    if asked.sampling.HasField("grammar"):
        pieces = Tokenizer.load("builtin").vocabulary.token_bytes
        blank = [token for token, piece in enumerate(pieces) if piece and not piece.strip()]
        told.sampling.logit_bias_token_ids.extend(blank)
        told.sampling.logit_bias_values.extend([-50.0] * len(blank))
    return told


@pytest.fixture(scope="module")
def roomy() -> Iterator[Server]:
    with serve(**FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def cramped() -> Iterator[Server]:
    with serve(**FLAGS, kv_cache_num_tokens=800) as server:
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_say_what_they_would_have_said(roomy, cramped, kind):
    expected, before, after = asyncio.run(ask(roomy, kind))
    assert after.preemptions == before.preemptions == 0
    answers, before, after = asyncio.run(ask(cramped, kind))
    assert after.preemptions > before.preemptions
    assert after.recomputed_tokens > before.recomputed_tokens
    for sample, alone in zip(answers, expected, strict=True):
        assert (sample.tokens, sample.text, sample.reason) == (alone.tokens, alone.text, alone.reason)
        assert sample.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
        assert sample.top_logprobs == pytest.approx(alone.top_logprobs, abs=1e-3)
    if kind == "plain":
        assert [len(sample.tokens) for sample in answers] == [LIMIT] * LONG
        return
    for sample in answers:
        assert sample.reason == g.FINISH_REASON_STOP
        assert len(json.loads(sample.text)) == WALK["minItems"]
        assert len(sample.top_logprobs) == 2 * len(sample.logprobs) == 2 * len(sample.tokens)
