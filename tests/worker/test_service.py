"""The worker as a scheduler sees it: a real server, real stubs."""

import asyncio
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2

from services.common.text.tokenizer import Tokenizer
from services.worker import server
from services.worker.boot.common import boot
from services.worker.step.slots import SlotTable
from tests.worker.scheduler import admission, status_of
from tests.worker.test_generation import greedy, prompt_of
from tests.worker.test_grammars import END
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import plan_pb2, worker_pb2


async def test_worker_info_says_what_plans_must_fit_into(connect, checkpoint):
    info = await (await connect()).info()
    facts = {field.name: value for field, value in info.ListFields()}
    assert facts.pop("incarnation_id")
    sizes = {each.name: each.value for each in facts.pop("choices")}
    assert (sizes["kv_cache_num_tokens"], sizes["max_seqs_per_forward"]) == ("4096", "8")
    one = worker_pb2.Rank(rank=0, size=1)
    assert facts == {
        "model": "llama",
        "contract_version": "2.6",
        "page_size": 16,
        "page_count": 256,
        "max_slots": 8,
        "max_tokens_per_step": 64,
        "max_context_tokens": 1024,
        "vocab_size": 400,
        "max_top_logprobs": 20,
        "max_plans_in_flight": 16,
        "max_micro_batches": 1,
        "prompt_logprobs": True,
        "grammars": True,
        "processed_logprobs": True,
        "thinking_budgets": True,
        "sleeps": True,
        "tensor_parallel": one,
        "pipeline_parallel": one,
        "device": "cpu",
        "dtype": "float32",
        "weights": weights_pb2.Weights(directory=str(checkpoint())),
    }


async def test_plans_in_flight_with_the_batch_left_out(connect, checkpoint, reference):
    scheduler = await (await connect()).connect(plans_in_flight=5)
    prompts = [prompt_of(5, 1), prompt_of(20, 2)]
    both = [admission(0, prompts[0], [0, 1]), admission(1, prompts[1], [2, 3])]
    await scheduler.send(admissions=both, batch=plan_pb2.Batch(slots=[0, 1], token_counts=[5, 20]))
    await scheduler.send(batch=plan_pb2.Batch(slots=[0, 1]))
    for _ in range(3):
        await scheduler.send()
    results = [await scheduler.result() for _ in range(5)]
    assert [result.step for result in results] == [1, 2, 3, 4, 5]
    assert all(list(result.slots) == [0, 1] for result in results)
    model = reference(checkpoint())
    for index, prompt in enumerate(prompts):
        assert [result.token_ids[index] for result in results] == greedy(model, prompt, 5)
    assert results[0].queued_plans <= 4
    assert results[-1].queued_plans == 0
    for result in results:
        assert result.timing.forward_ns > 0
        assert result.timing.sample_ns > 0
        assert result.timing.prepare_ns > 0


async def test_logprobs_travel_beside_their_slots(connect):
    scheduler = await (await connect()).connect()
    asked = plan_pb2.SamplingSettings(
        parameters={"temperature": 0, "logit_bias_token_ids": [17], "logit_bias_values": [1000.0]},
        logprobs=True,
        top_logprobs=3,
    )
    admissions = [admission(0, [5], [0]), admission(1, [5], [1], asked)]
    result = await scheduler.run(admissions=admissions, batch=plan_pb2.Batch(slots=[0, 1]))
    assert result.token_ids[1] == 17
    assert result.logprobs[0] != result.logprobs[0]
    assert result.logprobs[1] == pytest.approx(0, abs=1e-6)
    assert list(result.top_counts) == [0, 3]
    assert result.top_token_ids[0] == 17
    assert len(result.top_logprobs) == 3


async def test_grammars_are_followed_and_the_reason_of_a_failure_travels(connect, checkpoint):
    scheduler = await (await connect()).connect()
    grammars = 'start: "abc"', "start: (("
    both = [
        admission(slot, prompt_of(5), [slot], plan_pb2.SamplingSettings(parameters={"temperature": 0}, grammar=grammar))
        for slot, grammar in enumerate(grammars)
    ]
    result = await scheduler.run(admissions=both, batch=plan_pb2.Batch(slots=[0, 1], token_counts=[5, 5]))
    assert list(result.slots) == [0]
    tokens = list(result.token_ids)
    while tokens[-1] != END:
        tokens += (await scheduler.run(batch=plan_pb2.Batch(slots=[0]))).token_ids
    assert Tokenizer.load(str(checkpoint())).decode(tokens) == "abc"
    assert [failure.slot for failure in result.failures] == [1]
    assert result.failures[0].message.startswith("the grammar cannot be followed: ")


async def test_a_half_closed_stream_ends_well_after_its_last_answer(connect):
    scheduler = await (await connect()).connect()
    await scheduler.send(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))
    await scheduler.send()
    await scheduler.call.done_writing()
    assert [(await scheduler.result()).step for _ in range(2)] == [1, 2]
    assert await scheduler.call.read() is grpc.aio.EOF
    assert await scheduler.call.code() == grpc.StatusCode.OK


async def test_a_new_hello_takes_over_and_finds_every_slot_free(connect, worker):
    address = await worker()
    first, second = await connect(address), await connect(address)
    await first.connect()
    await first.run(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))
    await second.connect()
    assert await status_of(first.result()) == (
        grpc.StatusCode.ABORTED,
        "scheduler 'test' has taken this worker over",
    )
    result = await second.run(admissions=[admission(0, [6], [0])], batch=plan_pb2.Batch(slots=[0]))
    assert list(result.slots) == [0]


async def test_the_end_of_a_stream_frees_every_slot(connect):
    scheduler = await connect()
    for end in ("cancel", "done_writing", "breach"):
        await scheduler.connect()
        await scheduler.run(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))
        if end == "cancel":
            scheduler.call.cancel()
        elif end == "done_writing":
            await scheduler.call.done_writing()
        else:
            await status_of(scheduler.run(step=7))
    await scheduler.connect()
    await scheduler.run(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))


async def test_no_stream_leaves_a_thread_behind(connect, worker):
    address = await worker()
    for end in ("cancel", "done_writing", "taken over", "breach") * 3:
        scheduler = await (await connect(address)).connect()
        await scheduler.run(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))
        if end == "cancel":
            await scheduler.send()
            scheduler.call.cancel()
        elif end == "done_writing":
            await scheduler.call.done_writing()
        elif end == "breach":
            await scheduler.send(step=1)
    await (await connect(address)).connect()
    for _ in range(1000):
        left = sum(thread.name == "plans" for thread in threading.enumerate())
        if left == 1:
            break
        await asyncio.sleep(0.01)
    assert left == 1


async def test_another_incarnation_is_refused(connect):
    code, details = await status_of((await connect()).connect(incarnation="yesterday's"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "the worker has restarted; call GetWorkerInfo again" in details


@pytest.mark.parametrize("plans_in_flight", [0, 17])
async def test_plans_in_flight_must_be_in_range(plans_in_flight, connect):
    code, details = await status_of((await connect()).connect(plans_in_flight=plans_in_flight))
    assert (code, details) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"plans_in_flight={plans_in_flight}: expected 1 to 16",
    )


async def test_the_first_message_must_be_a_hello_and_no_other(connect):
    scheduler = await connect()
    await scheduler.info()
    scheduler.call = scheduler.stub.RunSteps()
    await scheduler.send()
    code, details = await status_of(scheduler.result())
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "the first message of RunSteps must be a hello")
    await scheduler.connect()
    await scheduler.call.write(worker_pb2.RunStepsRequest(hello=worker_pb2.Hello()))
    code, details = await status_of(scheduler.result())
    assert (code, details) == (grpc.StatusCode.INVALID_ARGUMENT, "after the hello every message must be a plan")


async def test_breaches_of_the_contract_end_the_stream_with_their_status(connect):
    scheduler = await connect()
    await scheduler.connect()
    code, details = await status_of(scheduler.run(step=2))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, "step 2 follows step 0: expected 1")
    await scheduler.connect()
    wrong = admission(0, [5], [256])
    code, details = await status_of(scheduler.run(admissions=[wrong], batch=plan_pb2.Batch(slots=[0])))
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == "plan.admissions[0].pages: page 256 is out of range, page_count=256"
    await scheduler.connect()
    groups = plan_pb2.HydragenGroups(starts=[0], counts=[2], prefix_pages=[1])
    code, details = await status_of(scheduler.run(hydragen=groups))
    assert (code, "hydragen" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    await scheduler.connect()
    both = [admission(0, [5], [0]), admission(1, [5], [1])]
    cut = {"batch": plan_pb2.Batch(slots=[0, 1]), "micro_batch_rows": [1, 1]}
    code, details = await status_of(scheduler.run(admissions=both, **cut))
    assert (code, "max_micro_batches" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_more_plans_than_agreed_end_the_stream(connect, gate):
    gate.set()
    scheduler = await (await connect()).connect(plans_in_flight=2)
    gate.clear()
    for _ in range(3):
        await scheduler.send()
    code, details = await status_of(scheduler.result())
    assert code == grpc.StatusCode.INVALID_ARGUMENT
    assert details == "more plans unanswered than the hello's plans_in_flight=2"


async def test_a_defect_in_a_step_ends_the_stream_and_nothing_else(connect, monkeypatch):
    scheduler = await (await connect()).connect()
    with monkeypatch.context() as broken:
        broken.setattr(SlotTable, "advance", lambda *_: 1 / 0)
        code, details = await status_of(
            scheduler.run(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))
        )
    assert (code, details) == (grpc.StatusCode.INTERNAL, "step 1 failed; the worker's log has the details")
    await scheduler.connect()
    result = await scheduler.run(admissions=[admission(0, [5], [0])], batch=plan_pb2.Batch(slots=[0]))
    assert list(result.slots) == [0]


async def test_calls_are_unavailable_while_the_model_loads(connect, worker, monkeypatch):
    loading = threading.Event()

    def slow_boot(config, *arguments):
        loading.wait()
        return boot(config, *arguments)

    monkeypatch.setattr(server, "boot", slow_boot)
    scheduler = await connect(await worker())
    request = worker_pb2.GetWorkerInfoRequest()
    try:
        code, details = await status_of(scheduler.stub.GetWorkerInfo(request, wait_for_ready=True))
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the model is still loading")
        assert (await scheduler.health.Check(health_pb2.HealthCheckRequest())).status == 2
        scheduler.call = scheduler.stub.RunSteps()
        assert (await status_of(scheduler.result()))[0] == grpc.StatusCode.UNAVAILABLE
    finally:
        loading.set()
    assert (await scheduler.info()).model == "llama"
