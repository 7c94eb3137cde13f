"""The messages in which plans go to a worker."""

import pytest

from services.scheduler.workers.stream import RankStream
from tokasaurus.worker.v1 import plan_pb2, worker_pb2


def sent(rank: RankStream) -> list[list[plan_pb2.StepPlan]]:
    """The plans of each message, all of which come after ``hello``."""
    hello, *messages = rank.messages(worker_pb2.Hello())
    assert hello.HasField("hello")
    return [list(message.plans.plans or [message.plan]) for message in messages]


def sent_steps(rank: RankStream) -> list[int]:
    return [plan.step for plans in sent(rank) for plan in plans]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_plans_that_wait_when_no_more_come_are_sent(count, together):
    rank = RankStream("a:1", reports=True)
    rank.takes_together = together
    for step in range(count):
        rank.send(plan_pb2.StepPlan(step=step))
    rank.finish()
    assert sent_steps(rank) == list(range(count))


@pytest.mark.parametrize("sizes", [[100] * 9, [300, 1, 1], [1, 300, 300, 1], [1, 254, 100, 254], [1, 1, 300]])
def test_plans_share_a_message_of_at_most_256_kib(sizes):
    rank = RankStream("a:1", reports=True)
    rank.takes_together = True
    for step, size in enumerate(sizes):
        rank.send(plan_pb2.StepPlan(step=step, admissions=[plan_pb2.Admission(token_ids=[1] * size * 256)]))
    rank.finish()
    plans = sent(rank)
    assert [plan.step for group in plans for plan in group] == list(range(len(sizes)))
    bytes_of = [sum(plan.ByteSize() for plan in group) for group in plans]
    assert all(size <= 256 * 1024 for size, group in zip(bytes_of, plans, strict=True) if len(group) > 1)
    following = [group[0].ByteSize() for group in plans[1:]]
    assert all(size + more > 256 * 1024 for size, more in zip(bytes_of, following, strict=False))
