"""A real worker goes on from tokens that came from elsewhere as if they had been its own."""

import json

import grpc
import pytest

from bench.server import serve
from services.common.text.tokenizer import Tokenizer
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import scheduler_pb2_grpc

pytestmark = pytest.mark.slow

WALK = {"type": "array", "items": {"enum": ["left", "right", "up", "down"]}, "minItems": 8, "maxItems": 8}
KINDS = {
    "penalties": g.GenerateRequest(
        sampling=g.Sampling(temperature=0, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3),
        stopping=g.Stopping(max_tokens=40, ignore_eos=True),
    ),
    "bias": g.GenerateRequest(
        sampling=g.Sampling(
            temperature=1.0, top_p=0.9, seed=3, logit_bias_token_ids=[300, 310], logit_bias_values=[4.0, -9.0],
            frequency_penalty=0.7,
        ),
        stopping=g.Stopping(max_tokens=40, min_tokens=30),
        n=2,
    ),
    "grammar": g.GenerateRequest(
        sampling=g.Sampling(temperature=1.0, seed=5, grammar=g.Grammar(json_schema=json.dumps(WALK))),
        stopping=g.Stopping(max_tokens=120),
    ),
}  # fmt: skip
PROMPT = "Question: Tom has 3 apples and buys 4 more. How many does he have?\nAnswer:"


@pytest.fixture(scope="module")
def address():
    with serve(device="cpu", dtype="float32", kv_cache_num_tokens=16 * 1024) as server:
        yield server.grpc_address


async def tokens(stub, request: g.GenerateRequest) -> dict[int, tuple[list[int], list[float], int]]:
    """Tokens, log-probabilities and reason of the end, of each sample."""
    ids, logprobs, reasons = {}, {}, {}
    async for response in stub.Generate(request):
        for told in response.outputs.samples:
            ids.setdefault(told.sample_index, []).extend(told.token_ids)
            logprobs.setdefault(told.sample_index, []).extend(told.logprobs.chosen)
            if told.HasField("finish"):
                reasons[told.sample_index] = told.finish.reason
    return {index: (ids.get(index, []), logprobs.get(index, []), reason) for index, reason in reasons.items()}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_comes_behind_a_cut_is_what_would_have_come(address, kind):
    prompt = Tokenizer.load("builtin").encode(PROMPT)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        request = g.GenerateRequest(tokens=g.TokenPrompt(token_ids=prompt), output=g.Output(logprobs=True))
        request.MergeFrom(KINDS[kind])
        uncut = await tokens(stub, request)
        request.n = 1
        for index, (ids, logprobs, reason) in uncut.items():
            assert len(ids) > 20
            for cut in (1, 17, len(ids) - 1):
                rest = g.GenerateRequest()
                rest.CopyFrom(request)
                rest.tokens.token_ids.extend(ids[:cut])
                rest.resume.generated_tokens, rest.resume.sample_index = cut, index
                [(more, scored, end)] = (await tokens(stub, rest)).values()
                assert (ids[:cut] + more, end) == (ids, reason)
                assert scored == pytest.approx(logprobs[cut:], abs=1e-3)
