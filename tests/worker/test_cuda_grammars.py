"""The GPU's runner follows grammars as the CPU's does, though it launches steps before it knows what they may draw."""

import dataclasses
import threading

import numpy as np
import pytest
import torch

from services.worker.boot.common import make_cache, make_limits
from services.worker.sampling.grammars import SlotGrammars
from tests.worker.driver import Driver, admission, batch
from tests.worker.grammars import BROKEN, LISTS, OBJECTS, WORDS, answer, ascii_grammars, ascii_tokenizer, follows
from tests.worker.interpreter import DEVICE, needs_triton
from tests.worker.no_streams import device_without_streams
from tests.worker.test_cuda_steps import FLAGS, PAGE, make_model

__all__ = ["device_without_streams"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]

VOCABULARY = 96


@pytest.fixture(scope="module")
def plain():
    """The CPU's runner."""
    from services.worker.attention.plain import PlainAttention
    from services.worker.runner.runner import StepRunner
    from services.worker.runner.shards import ShardThreads

    model = make_model(torch.device("cpu"))
    cache = make_cache(FLAGS, model, FLAGS.page_count)
    limits = make_limits(FLAGS, model, FLAGS.page_count, grammars=True)
    grammars = SlotGrammars(ascii_grammars(), VOCABULARY)
    runner = StepRunner(model, cache, PlainAttention(cache), limits, ShardThreads(1), grammars=grammars)
    yield Driver(runner)
    runner.close()


@pytest.fixture
def cuda(monkeypatch):
    """``cuda(graphs=0)``: the GPU's runner, with graphs of up to ``graphs`` rows."""
    made = []

    def make(graphs: int = 0) -> Driver:
        from services.worker.attention.cuda import CudaAttention
        from services.worker.runner.cuda import graphs as of_graphs
        from services.worker.runner.cuda.runner import CudaRunner
        from services.worker.runner.cuda.state import DeviceState
        from services.worker.sampling.fused import FusedSampler

        model = make_model(DEVICE)
        cache = make_cache(FLAGS, model, FLAGS.page_count)
        limits = make_limits(FLAGS, model, FLAGS.page_count, hydragen=True, grammars=True)
        state, grammars = DeviceState.empty(limits, DEVICE), SlotGrammars(ascii_grammars(), VOCABULARY)
        attention = CudaAttention(cache, 4, [model.rotaries[0]], dtype=model.embedding.dtype)
        parts = model.project, VOCABULARY, DEVICE, cache.tokens, state.page_table
        sampler = FusedSampler(*parts, mask_shape=(limits.max_slots, grammars.words))
        runner = CudaRunner(model, cache, attention, sampler, state, limits, grammars=grammars)
        if graphs:
            # One graph that holds all: quick in the interpreter.
            monkeypatch.setattr(of_graphs, "sizes_up_to", lambda largest, smallest: [largest])
            runner.capture(graphs)
        made.append(runner)
        return Driver(runner)

    yield make
    for runner in made:
        runner.close()


PROMPTS = [[5, 6, 7], [70] * PAGE]
ENDING = {"logit_bias_token_ids": np.array([0]), "logit_bias_values": np.array([20], np.float32)}


def test_the_same_tokens_as_on_the_cpu(plain, cuda):
    driver = cuda()
    for sampling in (ENDING | {"logprobs": True}, ENDING | {"temperature": 0.8, "seed": 3, "top_p": 0.9}):
        plain.reset()
        driver.reset()
        expected = plain.generate(PROMPTS, 8, grammar=WORDS, **sampling)
        assert driver.generate(PROMPTS, 8, grammar=WORDS, **sampling) == expected
        for tokens in expected:
            assert follows(WORDS, answer(ascii_tokenizer(), tokens, {0}))
        for slot, values in plain.logprobs.items():
            assert driver.logprobs[slot] == pytest.approx(values, abs=1e-4)


def history(driver: Driver) -> list[dict]:
    """Rows with grammars and without; one that pauses for more steps than are in flight, one that is cancelled and its
    slot used again at once, with a grammar and without; chunks beside them; a grammar that cannot be followed."""
    rows = [
        {"grammar": WORDS, "temperature": 0.9},
        {"temperature": 0.9, "seed": 2},
        {"grammar": LISTS, "logprobs": True, "top_logprobs": 2},
        {"grammar": OBJECTS, "temperature": 1.2, "seed": 4, "top_k": 5},
        {"grammar": BROKEN, "logprobs": True},
    ]
    admissions = tuple(admission(slot, [11 + slot, 12, 13], range(8 * slot, 8 * slot + 8), **row)
                       for slot, row in enumerate(rows))  # fmt: skip
    said = ascii_tokenizer().encode('{"size":2')
    fresh = admission(5, [20, 21, *said], range(40, 48), grammar=OBJECTS, temperature=0.5)
    resumed = dataclasses.replace(fresh, prompt_tokens=2)
    taken = (admission(0, [9, 8, 7], range(48, 56), grammar=OBJECTS), admission(4, [4, 4], range(56, 64)))
    again = admission(2, [3, 3], range(64, 72), temperature=0.7)
    return [
        {"admissions": admissions, "batch": batch(range(5), [3, 3, 2, 3, 3])},
        {"batch": batch([0, 1, 2, 3, 4])},
        {"batch": batch([0, 1, 3, 4])},
        {},
        {"admissions": (resumed,), "batch": batch([0, 1, 3, 5], [1, 1, 1, len(said)])},
        {"batch": batch([5, 1, 0, 3], [2, 1, 1, 1])},
        {"batch": batch([5, 1, 0, 3])},
        {"batch": batch([1, 2])},
        {"releases": [0, 4], "admissions": taken, "batch": batch([0, 1, 2, 4, 5], [3, 1, 1, 2, 1])},
        {"batch": batch([0, 1, 2, 3, 4, 5])},
        {},
        {"releases": [2], "admissions": (again,), "batch": batch([0, 2, 3, 4, 5], [1, 2, 1, 1, 1])},
        {"batch": batch([0, 2, 3, 4, 5])},
        {"batch": batch([3])},
        {},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("graphs", "ahead"), [(0, 4), (8, 3)])
def test_any_mixture_with_steps_in_flight(graphs, ahead, plain, cuda):
    driver, outcomes = cuda(graphs), []
    for each, most in ((plain, 1), (driver, ahead)):
        each.reset()
        outputs = run_ahead(each, history(each), most)
        outcomes.append(outputs)
        assert outputs[0].sampled.slots.tolist() == [0, 1, 3, 4]
        assert outputs[0].failures.keys() == {4}
    for expected, found in zip(*outcomes, strict=True):
        wanted, given, step = expected.sampled, found.sampled, f"step {expected.step}"
        assert given.slots.tolist() == wanted.slots.tolist(), step
        assert given.finite.tolist() == wanted.finite.tolist(), step
        good = wanted.finite
        assert given.token_ids[good].tolist() == wanted.token_ids[good].tolist(), step
        assert found.failures == expected.failures, step
        if wanted.logprobs is not None:
            np.testing.assert_allclose(given.logprobs[good], wanted.logprobs[good], atol=1e-4, err_msg=step)


def run_ahead(driver: Driver, history: list[dict], most: int) -> list:
    """Up to ``most`` steps launched before a thread takes results, as the engine's does."""
    outputs, running, room = [], [], threading.Semaphore(most)
    arrived, failed = threading.Condition(), []

    def take() -> None:
        for _ in history:
            with arrived:
                arrived.wait_for(lambda: running)
                step = running.pop(0)
            try:
                outputs.append(step.result())
            except Exception as error:
                failed.append(error)
            room.release()

    if most == 1:
        for parts in history:
            outputs.append(driver.run(**parts))
        return outputs
    thread = threading.Thread(target=take)
    thread.start()
    for parts in history:
        room.acquire()
        step = driver.runner.start(driver.plan(**parts))
        driver.steps += 1
        with arrived:
            running.append(step)
            arrived.notify()
    thread.join()
    assert not failed
    return outputs


def test_steps_without_grammars_wait_for_nothing(cuda, monkeypatch):
    """And steps with some wait for no more than what their rows sampled last."""
    from services.worker.runner.cuda.ring import Place

    driver, waits = cuda(8), []
    wait = Place.wait
    monkeypatch.setattr(Place, "wait", lambda place: (waits.append(place.index), wait(place))[1])
    both = admission(0, [5], range(4), grammar=WORDS), admission(1, [6], range(4, 8))
    steps = []
    for parts in ({"admissions": both, "batch": batch([0, 1])}, {"batch": batch([1])}, {}, {"batch": batch([0])}):
        steps.append(driver.runner.start(driver.plan(**parts)))
        driver.steps += 1
        seen = list(waits)
        waits.clear()
        assert seen == ([steps[0].place.index] if len(steps) == 4 else [])
    for step in steps:
        step.result()


def test_a_plain_row_beside_one_with_a_grammar_draws_the_same_as_alone(cuda):
    driver, found = cuda(8), []
    for company in ((), (admission(1, [6], range(4, 8), grammar=WORDS),)):
        driver.reset()
        rows = range(1 + len(company))
        driver.run(admissions=(admission(0, [5], range(4), temperature=0.9), *company), batch=batch(rows))
        for _ in range(5):
            driver.run()
        found.append(driver.tokens[0])
    assert found[0] == found[1]
