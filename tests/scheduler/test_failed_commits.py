"""Which files stay after an upload or a commit that failed. The connection to the workers is a stand-in."""

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from services.common.errors import FailedPrecondition, Unavailable
from services.scheduler.api.weights import WeightUpdates
from services.scheduler.core.request import PauseMode
from services.scheduler.workers.weights import WorkerWeights
from tests.scheduler.test_uploads import header
from tokasaurus.common.v1.weights_pb2 import Weights


class Recorded:
    """Stands for the hub, the link and the workers of ``WeightUpdates``. Commits fail, and discards are recorded."""

    def __init__(self, *, is_paused: bool) -> None:
        self.is_paused = is_paused
        self.discarded: list[bool] = []  # ``remove_upload`` of each discard
        self.sent = 0  # uploads
        self.engine = self.stream = self.weights = self
        self.committed, self.sleep = Weights(), None

    def pause(self, *given, **named) -> Future:
        return done(SimpleNamespace(number=1, aborted=0, joined=False))

    def resume(self, number: int) -> Future:
        return done(0.0)

    async def ask(self, question) -> bool:
        return self.is_paused

    async def send(self, *given) -> None:
        """Send nothing."""
        self.sent += 1

    def cancelling(self, cancel) -> nullcontext:
        return nullcontext()

    def stage(self, update) -> tuple[int, int]:
        return 1, 1

    def commit(self, update_id: str) -> Weights:
        raise Unavailable("a rank is lost")

    def discard(self, update_id: str, *, remove_upload: bool) -> None:
        self.discarded.append(remove_upload)

    def end(self) -> None:
        """End nothing: the connection is still the current one."""


def done(result) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future


@pytest.mark.parametrize("sent", [False, True])
async def test_files_are_not_removed_after_a_commit_was_sent(sent):
    """A rank may have committed although the call failed. Then the other ranks need the files."""
    recorded = Recorded(is_paused=sent)
    updates = WeightUpdates(recorded, recorded, recorded)

    async def requests():
        yield header()

    staged = await updates.upload(requests())
    with pytest.raises((Unavailable, FailedPrecondition)):
        await updates.commit(staged.update_id, PauseMode.KEEP, recompute=False)
    assert recorded.discarded == [not sent]


async def test_nothing_is_sent_on_a_connection_that_has_ended():
    recorded, weights = Recorded(is_paused=False), WorkerWeights({})
    weights.close()
    recorded.cancelling = weights.cancelling
    updates = WeightUpdates(recorded, recorded, recorded)

    async def requests():
        yield header()

    with pytest.raises(Unavailable, match="has ended"):
        await updates.upload(requests())
    assert (recorded.sent, recorded.discarded) == (0, [True])
