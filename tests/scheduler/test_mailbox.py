"""A mailbox counts what waits: a client that reads everything is never cut off."""

import numpy as np
import pytest

from services.common.errors import Overloaded
from services.scheduler.api.mailbox import Mailbox
from services.scheduler.core.output import Delta
from services.scheduler.core.request import Finish, FinishReason, Request, SamplingSettings
from services.scheduler.engine.events import Accepted
from tests.scheduler.test_weights import fields, update
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import session_pb2

MOST_BYTES = 4000


def delta(step: int, handles: int) -> Delta:
    tokens = np.arange(handles, dtype=np.uint32)
    return Delta(step, tokens, tokens, finished=[Finish(0, FinishReason.STOP, 1)])


def accepted(number: int) -> Accepted:
    return Accepted(Request(f"r{number}", np.zeros(1, np.uint32), SamplingSettings()))


@pytest.mark.parametrize("joins", [False, True])
async def test_a_reader_that_takes_everything_is_never_too_slow(joins):
    """However often several items were merged for it: here a thousand times what may wait at once."""
    mailbox = Mailbox(most_bytes=MOST_BYTES)
    mailbox.joins_acceptances = joins
    for round_ in range(1000):
        for number in range(4):
            mailbox.put(accepted(number))
        for step in range(1, 4):
            mailbox.put(delta(round_ * 3 + step, 20))
        mailbox.put(session_pb2.Heartbeat(nonce=round_))
        got = []
        while not got or not isinstance(got[-1], session_pb2.Heartbeat):
            got.append(await mailbox.get())
        *acceptances, outputs, _ = got
        assert [len(each) if isinstance(each, list) else 1 for each in acceptances] == ([4] if joins else [1] * 4)
        assert isinstance(outputs, Delta)
        assert len(outputs.tokens) == 60
    for _ in range(3):
        mailbox.put(delta(1, 300))
    with pytest.raises(Overloaded, match="too slowly"):
        await mailbox.get()


async def test_tokens_of_different_weights_are_not_in_one_message():
    mailbox = Mailbox()
    for step, version in enumerate(("", "", "v1", "v1", "v2"), 1):
        item = delta(step, 2)
        item.weights_version = version
        mailbox.put(item)
    got = [await mailbox.get() for _ in range(3)]
    assert [(each.weights_version, each.step, len(each.tokens)) for each in got] == [
        ("", 2, 4), ("v1", 4, 4), ("v2", 5, 2),
    ]  # fmt: skip


async def test_each_message_with_tokens_names_their_weights(service):
    for number in (1, 2):
        await update(service, number)
        request = g.GenerateRequest(**fields(10))
        messages = [each.outputs async for each in service.stub.Generate(request) if each.HasField("outputs")]
        assert {each.weights_version for each in messages} == {f"v{number}"}
