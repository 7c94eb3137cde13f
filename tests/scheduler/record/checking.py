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
    """Return a mutation of the sampling settings of the first admission, or of their parameters."""
    own = {name: values.pop(name) for name in plan_pb2.SamplingSettings.DESCRIPTOR.fields_by_name if name in values}
    changed = plan_pb2.SamplingSettings(parameters=values, **own)
    return lambda plan: plan.admissions[0].sampling.MergeFrom(changed)
