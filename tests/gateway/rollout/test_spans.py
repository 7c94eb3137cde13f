"""Versions of the weights that generated the tokens of samples whose scheduler was lost."""

import asyncio

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.engine.active_request import ActiveRequest
from services.gateway.engine.codec import SampleEnding
from services.gateway.engine.request import PromptRequest, Settings
from services.gateway.engine.sample_slots import BLOCK_TOKENS, SampleSlots
from services.gateway.engine.spans import add_earlier_spans, count_tokens, join_spans
from services.gateway.rollout import control
from tests.fakes.model import FakeShape, continuation
from tests.fakes.worker import FakeWorker
from tests.gateway.deployment import PATIENCE_S, eventually_async
from tests.gateway.replicas import Replicas
from tests.gateway.rollout.schedulers import Schedulers
from tests.properties import examples
from tests.quick import quick_if
from tokasaurus.common.v1.sampling_pb2 import Sampling
from tokasaurus.scheduler.v1 import control_pb2, scheduler_pb2_grpc

PROMPT, MOST = list(range(50, 90)), 60


async def whole(running: ActiveRequest) -> tuple[list[int], tuple]:
    """Return the tokens and the spans of the only sample, when it has ended."""
    [sample], tokens = running.samples, []
    async with asyncio.timeout(PATIENCE_S):
        while sample.ending is None:
            await (running.wait_updated() if running.per_token else running.wait_ended())
    ids, _ = sample.take()
    return [*tokens, *map(int, ids)], sample.outcome.weights


def check(tokens: list[int], spans: tuple, seed: int) -> None:
    """Check that the weights of its span choose each token."""
    at = 0
    assert count_tokens(spans) == len(tokens)
    for version, count in spans:
        number = int(version.removeprefix("v") or 0)
        expected = continuation(FakeShape(), [*PROMPT, *tokens[:at]], count, seed=seed, weights=number)
        assert tokens[at : at + count] == expected
        at += count


async def answer_five(worker: FakeWorker, running: ActiveRequest) -> None:
    """Let ``worker`` answer five plans and hold the next one, and wait until the gateway has the tokens."""
    answered, before = worker.answered, running.generated_tokens
    worker.release(5)
    await worker.until_held()
    assert worker.answered == answered + 5
    await eventually_async(lambda: running.generated_tokens >= before + 4)  # the first may compute a prompt


async def commit(address: str, number: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        staging = control_pb2.StageWeightsRequest(directory=f"/weights/{number}", version=f"v{number}")
        staged = await stub.StageWeights(staging)
        await stub.CommitWeights(control_pb2.CommitWeightsRequest(update_id=staged.update_id))


@pytest.mark.parametrize(
    ("streaming", "first"),
    quick_if(lambda streaming, first: streaming and first, [(True, 0), (True, 1), (False, 0), (False, 1)]),
)
async def test_spans_of_a_lost_scheduler_are_joined_with_those_of_the_next(streaming, first):
    async with Schedulers.running() as schedulers:
        [fleet], workers = schedulers.fleets, schedulers.workers
        if first:
            await control.update_weights(fleet, "/weights/1", "v1", "keep")
        for worker in workers:
            worker.hold()
            worker.on_commit = worker.hold
        request = PromptRequest(
            "r", "tokasaurus-builtin", np.array(PROMPT, np.uint32), MOST, 7,
            Settings(sampling=Sampling(temperature=1.0), ignore_eos=True),
        )  # fmt: skip
        running = await fleet.generate([request], streaming=streaming)
        await eventually_async(lambda: all(each.accepted for each in running.scheduler_requests))
        lost = schedulers.running_at()
        await answer_five(workers[lost], running)
        updating = asyncio.create_task(control.update_weights(fleet, "/weights/2", "v2", "keep"))
        await schedulers.until_paused(lost)
        workers[lost].release()
        await updating
        await answer_five(workers[lost], running)
        await schedulers.stop(lost)
        other = 1 - lost
        await answer_five(workers[other], running)
        updating = asyncio.create_task(commit(schedulers.addresses[other], 3))
        await schedulers.until_paused(other)
        workers[other].release()
        await updating
        workers[other].release()
        tokens, spans = await whole(running)
        check(tokens, spans, seed=7)
        assert len(tokens) == MOST
        assert [version for version, _ in spans] == ["v1" if first else "", "v2", "v3"]
        running.close()


@pytest.mark.slow
async def test_after_a_failover_without_updates_there_are_no_spans():
    async with Schedulers.running() as schedulers:
        for worker in schedulers.workers:
            worker.hold()
        prompt = PromptRequest("r", "tokasaurus-builtin", np.array(PROMPT, np.uint32), MOST, 7, Settings())
        running = await schedulers.fleets[0].generate([prompt], streaming=False)
        await eventually_async(lambda: all(each.accepted for each in running.scheduler_requests))
        lost = schedulers.running_at()
        await answer_five(schedulers.workers[lost], running)
        await schedulers.stop(lost)
        schedulers.workers[1 - lost].release()
        tokens, spans = await whole(running)
        assert (len(tokens) > 0, spans) == (True, ())
        running.close()


@pytest.mark.slow
async def test_spans_are_exact_after_a_kill_between_updates(tmp_path):
    """Schedulers are processes. One is killed after an update, and another update follows when it has restarted."""
    async with Replicas.running(tmp_path, 2, worker={"step_ms": 20}) as pair, pair.deployment.async_sdk() as sdk:
        post = pair.deployment.post

        async def update(number: int) -> int:
            body = {"model_path": f"/weights/{number}", "weight_version": f"v{number}"}
            return (await asyncio.to_thread(post, "/update_weights_from_disk", body)).status_code

        async def answer(seed: int) -> tuple[list[int], list[dict]]:
            more = {"ignore_eos": True, "return_token_ids": True}
            call = sdk.completions.create(
                model="tokasaurus-builtin", prompt=PROMPT, max_tokens=400, seed=seed, temperature=1.0,
                stream=bool(seed % 2), extra_body=more,
            )  # fmt: skip
            tokens, weights = [], []
            for chunk in [each async for each in await call] if seed % 2 else [await call]:
                for choice in chunk.choices:
                    tokens += choice.token_ids
                    weights += getattr(choice, "weights", None) or []
            return tokens, weights

        assert await update(1) == 200
        answers = [asyncio.create_task(answer(seed)) for seed in range(8)]
        await eventually_async(lambda: pair.deployment.metric("toka_num_requests_running") >= 8)
        assert await update(2) == 200
        pair.schedulers[0].kill()
        await eventually_async(lambda: pair.ready == 1)
        pair.schedulers[0].start()
        await eventually_async(lambda: pair.ready == 2)
        assert await update(3) == 200
        for seed, each in enumerate(answers):
            tokens, weights = await each
            assert len(tokens) == 400
            check(tokens, tuple((span["version"], span["tokens"]) for span in weights), seed)


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["", "a", "b", None]), st.integers(0, 2 * BLOCK_TOKENS)), max_size=6))
def test_slots_count_the_tokens_of_each_version(runs):
    slots, expected = SampleSlots(), ()
    handle = slots.take(2, per_token=False)
    for version, count in runs:
        if count:
            slots.change_weights(version)
        for token in range(count):
            slots.store(np.array([handle], np.uint32), np.array([token], np.uint32))
        expected = join_spans(expected, ((version, count),))
    assert slots.spans(handle) == expected
    assert slots.spans(handle + 1) == ()
    slots.give(handle)
    assert slots.spans(handle) == ()


def test_tokens_of_an_old_scheduler_are_in_no_span():
    ending = SampleEnding("stop", False, 0, 3, 9, 0, 0.0, 0.0, 0.0, None)
    assert add_earlier_spans(ending, ((None, 4),)).weights == ()
    assert add_earlier_spans(ending, ((None, 4), ("a", 2))).weights == (("a", 2), ("", 3))
    assert add_earlier_spans(ending, (("a", 9),)).weights == (("a", 9),)
