"""A real worker and a cache far too small for what is asked: sequences are preempted, and answers are the same."""

import asyncio

import grpc

from bench.server import Server, serve
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

SHORT, LONG = 40, 12
LIMIT = 120  # of both: one class of requests


def prompt(number: int) -> str:
    return f"Question: Tom has {number + 2} apples and buys {3 * number + 1} more. How many does he have?\nAnswer:"


async def answer(stub, number: int, **stopping) -> list[int]:
    request = g.GenerateRequest(text=prompt(number), admission=g.ADMISSION_MODE_PREDICTED)
    request.sampling.temperature = 0
    request.stopping.MergeFrom(g.Stopping(max_tokens=LIMIT, **stopping))
    return [
        token
        async for response in stub.Generate(request)
        for sample in response.outputs.samples
        for token in sample.token_ids
    ]


async def ask(server: Server) -> tuple[list[list[int]], observe_pb2.Counters]:
    """Many short answers, then long ones of the same class; returns the long ones."""
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        for start in range(0, SHORT, 8):
            await asyncio.gather(*(answer(stub, start + index, strings=[" "]) for index in range(8)))
        answers = await asyncio.gather(*(answer(stub, index, ignore_eos=True) for index in range(LONG)))
        load = (await stub.GetLoad(observe_pb2.GetLoadRequest())).load
        return list(answers), load.counters


def test_preempted_sequences_say_what_they_would_have_said():
    flags = {"device": "cpu", "dtype": "float32", "admission_margin": 0}
    with serve(**flags) as server:
        expected, counters = asyncio.run(ask(server))
        assert counters.preemptions == 0
    with serve(**flags, kv_cache_num_tokens=800) as server:
        answers, counters = asyncio.run(ask(server))
        assert counters.preemptions > 0
        assert counters.recomputed_tokens > 0
    assert [len(tokens) for tokens in answers] == [LIMIT] * LONG
    assert answers == expected
