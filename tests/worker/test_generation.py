"""Plans through a runner give the tokens that transformers generates."""

import numpy as np
import pytest
import torch

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.worker.boot.common import boot
from services.worker.layers import matmul_cpu
from services.worker.models.decoder import DecoderModel
from tests.checkpoints import ARCHITECTURES
from tests.e2e.samples import Sample, agreement
from tests.quick import quick_if
from tests.worker.driver import Driver, admission, batch

# Granite and Phi-3 have compiled decoders of their own, which take seconds to compile.
EACH = quick_if(lambda architecture: architecture not in {"granite", "phi3"}, ARCHITECTURES)
LENGTHS = {"one token": 1, "a page": 16, "a page and one": 17, "several chunks": 77}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(2, 390, length).tolist()


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    """Without a cache: nothing to share with what is tested."""
    token_ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            token_ids.append(int(model(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("length", quick_if(lambda length: length in {17, 77}, LENGTHS.values()), ids=LENGTHS)
@pytest.mark.parametrize("architecture", EACH)
def test_greedy_tokens_are_those_of_transformers(architecture, length, checkpoint, reference, runner_for):
    directory, prompt = checkpoint(architecture), prompt_of(length)
    (tokens,) = runner_for(directory).generate([prompt], 20, chunk=30)
    assert tokens == greedy(reference(directory), prompt, 20)


@pytest.mark.parametrize("architecture", EACH)
def test_sequences_that_run_at_once_give_the_tokens_of_transformers(architecture, checkpoint, reference, runner_for):
    """64 prompts in chunks, beside rows that decode."""
    directory, model = checkpoint(architecture), reference(checkpoint(architecture))
    prompts = [prompt_of(1 + 7 * seed % 60, seed) for seed in range(64)]
    answers = runner_for(directory).generate(prompts, 5, chunk=40)
    for prompt, tokens in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("architecture", EACH)
def test_a_cached_prefix_changes_no_token(architecture, checkpoint, runner_for):
    """Another slot takes over the pages of a prompt. Its own tokens begin inside of a page."""
    driver, prompt = runner_for(checkpoint(architecture)), prompt_of(77)
    (expected,) = driver.generate([prompt], 12, chunk=30)
    pages = [*range(4), *range(50, 53)]
    driver.run(admissions=(admission(1, prompt, pages, cached_tokens=64),), batch=batch([1], [13]))
    while len(driver.tokens[1]) < 12:
        driver.run(batch=batch([1], [1]))
    assert driver.tokens[1] == expected


WINDOWED = {
    "mistral": {"sliding_window": 20},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
}


@pytest.mark.parametrize("length", [5, 77], ids=["answer beyond the window", "prompt beyond the window"])
@pytest.mark.parametrize("architecture", WINDOWED)
def test_greedy_tokens_behind_a_sliding_window_are_those_of_transformers(
    architecture, length, checkpoint, reference, runner_for
):
    directory, prompt = checkpoint(architecture, **WINDOWED[architecture]), prompt_of(length)
    (tokens,) = runner_for(directory).generate([prompt], 24, chunk=60)
    assert tokens == greedy(reference(directory), prompt, 24)


@pytest.mark.slow
def test_a_compiled_model_has_a_window_in_some_of_its_layers(checkpoint, reference, runner_for):
    directory, prompt = checkpoint("qwen2", **WINDOWED["qwen2"]), prompt_of(33)
    (tokens,) = runner_for(directory, torch_compile=True).generate([prompt], 12, chunk=25)
    assert tokens == greedy(reference(directory), prompt, 12)


@pytest.mark.slow
def test_a_compiled_model_has_experts(checkpoint, reference, runner_for):
    directory, prompt = checkpoint("gpt_oss"), prompt_of(33)
    (tokens,) = runner_for(directory, torch_compile=True).generate([prompt], 12, chunk=25)
    assert tokens == greedy(reference(directory), prompt, 12)


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    quick_if(
        lambda dtype, bounds: dtype == "float16", [("float16", (0.06, 0.01, 0.97)), ("bfloat16", (0.25, 0.05, 0.93))]
    ),
)
def test_shorter_floats_agree_in_log_probabilities(dtype, bounds, checkpoint, reference, runner_for):
    driver = runner_for(dtype=dtype)
    prompts = [prompt_of(length, length) for length in (1, 17, 200, 60, 33)]
    driver.generate(prompts, 20, chunk=96, logprobs=True)
    samples = [Sample(driver.tokens[slot], driver.logprobs[slot]) for slot in range(len(prompts))]
    agreement(reference(checkpoint()), list(zip(prompts, samples, strict=True))).check(*bounds)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_biases_count_in_decode_steps_too(architecture, checkpoint, reference, runner_for):
    biases = {"attention_bias": True} | ({"mlp_bias": True} if architecture == "llama" else {})
    directory, prompt = checkpoint(architecture, **biases), prompt_of(10)
    (tokens,) = runner_for(directory).generate([prompt], 12)
    assert tokens == greedy(reference(directory), prompt, 12)


def test_another_blas_in_torch_only_costs_time(checkpoint, reference, monkeypatch):
    monkeypatch.setattr(matmul_cpu, "available", lambda: False)
    config = WorkerConfig(model=str(checkpoint()), kv_cache_num_tokens=1024)
    prompt = prompt_of(10)
    (tokens,) = Driver(boot(config).runner).generate([prompt], 12)
    assert tokens == greedy(reference(checkpoint()), prompt, 12)


def test_64_sequences_of_mixed_lengths_at_once(checkpoint, reference, runner_for):
    prompts = [prompt_of(1 + (seed * 37) % 130, seed) for seed in range(64)]
    together = runner_for(max_tokens_per_forward=512).generate(prompts, 10, chunk=50)
    for prompt, tokens in zip(prompts, together, strict=True):
        assert tokens == greedy(reference(checkpoint()), prompt, 10)


def test_logprobs_are_those_of_transformers(checkpoint, reference, runner_for):
    driver, prompt = runner_for(), prompt_of(40)
    (tokens,) = driver.generate([prompt], 10, logprobs=True)
    with torch.inference_mode():
        logits = reference(checkpoint())(torch.tensor([prompt + tokens])).logits[0]
    expected = logits[39:-1].log_softmax(-1).max(-1).values
    torch.testing.assert_close(torch.tensor(driver.logprobs[0]), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_tokens(threads, checkpoint, reference, runner_for):
    prompts = [prompt_of(length, length) for length in (3, 60, 1, 33)]
    tokens = runner_for(torch_num_threads=threads).generate(prompts, 8, chunk=25)
    assert tokens == [greedy(reference(checkpoint()), prompt, 8) for prompt in prompts]


def test_a_prefix_in_shared_pages_is_not_computed_again(checkpoint, reference, runner_for):
    driver, prefix = runner_for(), prompt_of(32)
    first, second = [*prefix, 5, 6, 7], [*prefix, 8, 9]
    driver.run(admissions=(admission(0, first, [0, 1, 2]),), batch=batch([0], [35]))
    driver.run(admissions=(admission(1, second, [0, 1, 3], cached_tokens=32),), batch=batch([0, 1], [1, 2]))
    driver.run(batch=batch([0, 1]))
    model = reference(checkpoint())
    assert driver.tokens == {0: greedy(model, first, 3), 1: greedy(model, second, 2)}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_reads_pages_that_another_row_fills_in_the_same_step(threads, checkpoint, reference, runner_for):
    driver, prefix = runner_for(torch_num_threads=threads), prompt_of(48)
    first, second = [*prefix, 5, 6, 7], [*prefix, 8, 9]
    both = admission(0, first, [0, 1, 2, 3]), admission(1, second, [0, 1, 2, 4], cached_tokens=48)
    driver.run(admissions=both, batch=batch([1, 0], [2, 51]))
    driver.run(batch=batch([0, 1]))
    model = reference(checkpoint())
    assert driver.tokens == {0: greedy(model, first, 2), 1: greedy(model, second, 2)}


def test_a_fork_goes_on_from_a_copied_page(checkpoint, reference, runner_for):
    driver, prompt = runner_for(), prompt_of(21)
    driver.run(admissions=(admission(0, prompt, [0, 1]),), batch=batch([0], [21]))
    model = reference(checkpoint())
    # The fork shares the full page 0, takes a copy of the unfinished page 1, and goes another way.
    forked = [*prompt, 11]
    driver.run(
        admissions=(admission(1, forked, [0, 2], cached_tokens=21),),
        copy_sources=[1],
        copy_targets=[2],
        batch=batch([0, 1]),
    )
    driver.run()
    assert driver.tokens == {0: greedy(model, prompt, 3), 1: greedy(model, forked, 2)}


def test_a_slot_and_its_pages_are_used_again(checkpoint, reference, runner_for):
    driver, model = runner_for(), reference(checkpoint())
    driver.run(admissions=(admission(0, prompt_of(20), [0, 1], temperature=1.0, top_k=3),), batch=batch([0], [20]))
    driver.tokens.clear()
    prompt = prompt_of(18, 5)
    driver.run(releases=[0], admissions=(admission(0, prompt, [1, 0]),), batch=batch([0], [18]))
    driver.run(batch=batch([0]))
    assert driver.tokens[0] == greedy(model, prompt, 2)


def test_a_resumed_sequence_goes_on_as_if_never_preempted(runner_for):
    driver, prompt = runner_for(), prompt_of(25)
    sampling = {"temperature": 1.0, "seed": 7, "sample_index": 3}
    (tokens,) = driver.generate([prompt], 12, **sampling)
    driver.reset()
    driver.run(admissions=(admission(5, prompt + tokens[:6], [9, 3, 4], **sampling),), batch=batch([5], [31]))
    for _ in range(5):
        driver.run(batch=batch([5]))
    assert driver.tokens[5] == tokens[6:]


def test_pages_are_appended_as_a_sequence_grows(checkpoint, reference, runner_for):
    driver, prompt = runner_for(), prompt_of(15)
    driver.run(admissions=(admission(0, prompt, [7]),), batch=batch([0], [15]))
    driver.run(batch=batch([0]))
    driver.run(append_slots=[0], append_pages=[2])  # the batch stays
    driver.run()
    assert driver.tokens[0] == greedy(reference(checkpoint()), prompt, 4)


def test_rows_may_leave_and_return_to_the_batch(checkpoint, reference, runner_for):
    driver, prompts = runner_for(), [prompt_of(5, 1), prompt_of(9, 2)]
    both = tuple(admission(slot, prompts[slot], [slot]) for slot in (0, 1))
    driver.run(admissions=both, batch=batch([0, 1], [5, 9]))
    for slots in ([1], [0], [], [0, 1]):
        driver.run(batch=batch(slots))
    assert driver.tokens == {slot: greedy(reference(checkpoint()), prompts[slot], 3) for slot in (0, 1)}


@pytest.mark.parametrize(
    ("compiled", "sampling", "rows"),
    [
        (False, {}, [1, 1, 1]),
        (False, {"prompt_logprobs": 0}, [30, 30, 17]),
        pytest.param(True, {}, [30, 30, 17], marks=pytest.mark.slow),
    ],
)
def test_the_last_layer_continues_with_the_tokens_that_are_needed(compiled, sampling, rows, runner_for, monkeypatch):
    """A prompt of 77 tokens in chunks, of which the last samples. A chunk without samples continues with one token."""
    seen, forward = [], DecoderModel.forward

    def called(model, *arguments):
        hidden = forward(model, *arguments)
        seen.append(len(hidden))
        return hidden

    driver = runner_for(torch_num_threads=1, torch_compile=compiled)
    monkeypatch.setattr(DecoderModel, "forward", called)
    driver.generate([prompt_of(77)], 1, chunk=30, **sampling)
    assert seen == rows


def test_a_chunk_that_stops_short_samples_nothing(runner_for):
    driver = runner_for()
    output = driver.run(admissions=(admission(0, prompt_of(20), [0, 1]),), batch=batch([0], [12]))
    assert output.sampled.slots.size == 0
    assert driver.run(batch=batch([0], [8])).sampled.slots.tolist() == [0]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # of torch itself
def test_compiled_and_eager_models_give_the_same_tokens(runner_for):
    prompts = [prompt_of(length, length) for length in (1, 16, 40)]
    expected = runner_for().generate(prompts, 8)
    try:
        compiled = runner_for(torch_compile=True)
    except InvalidRequest as error:
        pytest.skip(error.message)
    assert compiled.generate(prompts, 8) == expected


def test_logits_that_are_not_numbers_fail_their_row_only(checkpoint, reference, runner_for):
    driver, prompts = runner_for(), [prompt_of(20, 1), prompt_of(20, 2)]
    both = tuple(admission(slot, prompts[slot], [2 * slot, 2 * slot + 1]) for slot in (0, 1))
    driver.run(admissions=both, batch=batch([0, 1], [20, 20]))
    driver.runner.cache.keys[0][0].fill_(float("nan"))
    failing = driver.run(batch=batch([0, 1])).sampled
    assert failing.finite.tolist() == [False, True]
    driver.runner.cache.keys[0][0].zero_()
    assert driver.run().sampled.finite.tolist() == [False, True]  # its cache is spoilt: it stays failed
    assert driver.tokens[1] == greedy(reference(checkpoint()), prompts[1], 3)
    again = driver.run(releases=[0], admissions=(admission(0, prompts[0], [0, 1]),), batch=batch([0], [20])).sampled
    assert again.finite.tolist() == [True]
