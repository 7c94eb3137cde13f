"""A scheduler that speaks to a real worker: one stream of plans."""

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokasaurus.worker.v1 import plan_pb2, worker_pb2, worker_pb2_grpc

GREEDY = plan_pb2.SamplingSettings(parameters={"temperature": 0})


class Scheduler:
    """One stream of plans."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.step = 0

    async def info(self) -> worker_pb2.WorkerInfo:
        """Waits until the model is loaded."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        while (await watch.read()).status != 1:
            pass
        watch.cancel()
        return (await self.stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info

    async def connect(self, *, plans_in_flight: int = 4, incarnation: str | None = None, **hello) -> "Scheduler":
        expected = (await self.info()).incarnation_id
        expected = expected if incarnation is None else incarnation
        self.call, self.step = self.stub.RunSteps(), 0
        hello = worker_pb2.Hello(
            scheduler_id="test", expected_incarnation_id=expected, plans_in_flight=plans_in_flight, **hello
        )
        await self.call.write(worker_pb2.RunStepsRequest(hello=hello))
        answer = await self.call.read()
        if answer is grpc.aio.EOF:
            await self.fails()
        assert answer.ready.incarnation_id == expected
        assert answer.ready.takes_plans_together
        return self

    async def send_together(self, *plans: dict) -> None:
        """Plans in one message."""
        steps = range(self.step + 1, self.step + 1 + len(plans))
        self.step += len(plans)
        together = [plan_pb2.StepPlan(**{"step": step} | parts) for step, parts in zip(steps, plans, strict=True)]
        await self.call.write(worker_pb2.RunStepsRequest(plans=worker_pb2.StepPlans(plans=together)))

    async def send(self, **parts) -> None:
        self.step += 1
        plan = plan_pb2.StepPlan(**{"step": self.step} | parts)
        await self.call.write(worker_pb2.RunStepsRequest(plan=plan))

    async def result(self) -> plan_pb2.StepResult:
        answer = await self.call.read()
        if answer is grpc.aio.EOF:
            await self.fails()
        return answer.result

    async def run(self, **parts) -> plan_pb2.StepResult:
        await self.send(**parts)
        return await self.result()

    async def fails(self) -> None:
        raise grpc.aio.AioRpcError(
            await self.call.code(), await self.call.initial_metadata(), None, await self.call.details()
        )


def admission(slot: int, prompt: list[int], pages, sampling=GREEDY, **parts) -> plan_pb2.Admission:
    return plan_pb2.Admission(slot=slot, token_ids=prompt, pages=pages, sampling=sampling, **parts)


async def status_of(awaitable) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await awaitable
    return caught.value.code(), caught.value.details()
