"""Plans and answers that share a message."""

import grpc

from tests.worker.scheduler import admission, status_of
from tests.worker.test_generation import greedy, prompt_of
from tokasaurus.worker.v1 import plan_pb2


async def test_plans_in_one_message_are_answered_one_by_one(connect, checkpoint, reference):
    """To a scheduler that does not take answers together."""
    scheduler, prompt = await (await connect()).connect(), prompt_of(5, 1)
    first = {"admissions": [admission(0, prompt, [0])], "batch": plan_pb2.Batch(slots=[0], token_counts=[5])}
    await scheduler.send_together(first, {"batch": plan_pb2.Batch(slots=[0])}, {})
    results = [await scheduler.result() for _ in range(3)]
    assert [result.step for result in results] == [1, 2, 3]
    assert [result.token_ids[0] for result in results] == greedy(reference(checkpoint()), prompt, 3)


async def test_answers_that_pile_up_come_together_where_they_are_taken(connect, gate):
    gate.set()
    scheduler = await (await connect()).connect(plans_in_flight=16, takes_results_together=True)
    gate.clear()
    first = {"admissions": [admission(0, [5], [0])], "batch": plan_pb2.Batch(slots=[0])}
    await scheduler.send_together(first, *[{}] * 15)
    gate.set()
    steps, messages = [], 0
    while len(steps) < 16:
        message = await scheduler.call.read()
        kind = message.WhichOneof("payload")
        found = [message.result] if kind == "result" else list(message.results.results)
        assert (len(found) > 1) is (kind == "results")
        steps += [result.step for result in found]
        messages += 1
    assert steps == list(range(1, 17))
    assert messages <= 16


async def test_a_result_waits_for_the_next_one_if_its_plan_says_so(connect):
    scheduler = await (await connect()).connect(takes_results_together=True)
    batch = plan_pb2.Batch(slots=[0])
    parts = {"admissions": [admission(0, [5], [0])], "batch": batch}
    for step in range(1, 16, 2):
        await scheduler.send(result_with_next=True, **parts)
        await scheduler.send()
        message = await scheduler.call.read()
        assert [result.step for result in message.results.results] == [step, step + 1]
        parts = {}


async def test_more_plans_in_one_message_than_agreed_end_the_stream(connect):
    scheduler = await (await connect()).connect(plans_in_flight=2)
    await scheduler.send_together({"admissions": [admission(0, [5], [0])], "batch": plan_pb2.Batch(slots=[0])}, {}, {})
    code, details = await status_of(scheduler.result())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == "more plans unanswered than the hello's plans_in_flight=2"


async def test_a_breach_in_the_middle_of_a_message_comes_behind_the_answers_before_it(connect):
    scheduler = await (await connect()).connect()
    first = {"admissions": [admission(0, [5], [0])], "batch": plan_pb2.Batch(slots=[0])}
    await scheduler.send_together(first, {"step": 7}, {})
    assert (await scheduler.result()).step == 1
    assert await status_of(scheduler.result()) == (
        grpc.StatusCode.FAILED_PRECONDITION,
        "step 7 follows step 1: expected 2",
    )
