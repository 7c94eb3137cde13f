"""Recorded plans, changed or not, in the checker."""

from collections.abc import Callable, Iterator

from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.reader import RecordedStep
from tests.fakes.model import FakeShape
from tests.scheduler.record.loop import SHAPE
from tokasaurus.worker.v1 import plan_pb2

Mutation = Callable[[plan_pb2.StepPlan], None]


def replayed(
    steps: list[RecordedStep], step: int = 0, mutate: Mutation | None = None, shape: FakeShape = SHAPE
) -> Iterator[PlanChecker]:
    """The checker behind each step; the plan of ``step`` is changed first."""
    checker = PlanChecker(shape.limits)
    for recorded in steps:
        plan = plan_pb2.StepPlan.FromString(recorded.plan.plan.SerializeToString())
        if plan.step == step:
            mutate(plan)
        checker.apply(plan)
        checker.result_received(recorded.result.result)
        yield checker


def settings_of(**values) -> Mutation:
    """Other sampling settings in the first admission."""
    return lambda plan: plan.admissions[0].sampling.MergeFrom(plan_pb2.SamplingSettings(**values))
