"""What requests ask for goes to the worker in messages that it takes, however much they are together."""

import asyncio

from services.common.rpc import channel
from services.scheduler.core.step import prefill
from tests.fakes.model import FakeShape
from tests.scheduler.service import start
from tokasaurus.scheduler.v1 import generate_pb2 as g

ENTRIES = 2000
BIAS = g.Sampling(seed=3, logit_bias_token_ids=range(ENTRIES), logit_bias_values=[1.0] * ENTRIES)


async def test_large_biases_of_many_samples_lose_no_worker(monkeypatch):
    """A message holds 64 of them here, and a plan has room for all. Admissions fill 3/8 of a message: 24 of 64 MiB."""
    message = 64 * 8 * ENTRIES
    options = {"grpc.max_send_message_length": message, "grpc.max_receive_message_length": message}
    monkeypatch.setattr(channel, "CHANNEL_OPTIONS", list((dict(channel.CHANNEL_OPTIONS) | options).items()))
    monkeypatch.setattr(prefill, "_MOST_BYTES", message * 3 // 8)
    async with start(FakeShape()) as service:
        asked = {"tokens": g.TokenPrompt(token_ids=[50, 51]), "stopping": g.Stopping(max_tokens=40)}
        innocent, *biased = await asyncio.gather(
            service.generate(**asked, n=2),
            *(service.generate(**asked, n=100, sampling=BIAS) for _ in range(2)),
        )
        samples = [sample for samples in (innocent, *biased) for sample in samples.values()]
        assert {sample.finish.reason for sample in samples} == {g.FINISH_REASON_LENGTH}
        assert len(samples) == 202
        assert service.worker.streams == 1
        assert (await service.load()).counters.worker_restarts == 0
