"""Several ranks give what one gives, and what transformers gives."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.quick import quick_if
from tests.worker.driver import Driver, admission, batch
from tests.worker.parallel.cases import CASES, EXPERT_CASES, MODELS, SIZES, prompt_of
from tests.worker.parallel.jobs import run_on
from tests.worker.parallel.replica import alone, cut, same

QUICK = {
    ("llama", 2, 1, False), ("llama", 2, 1, True), ("llama", 1, 2, False), ("tied", 2, 2, True),
    ("norms of all heads", 2, 1, False), ("shared experts", 2, 1, True),
}  # fmt: skip
LENGTHS = (1, 16, 17, 45)
TOKENS = 6


def expected_logits(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return the logits from which each of ``tokens`` was sampled."""
    with torch.inference_mode():
        return model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size", "sharded"),
    quick_if(lambda *case: case in QUICK, CASES),
)
def test_tokens_and_logits_are_those_of_transformers(
    name, tp_size, pp_size, sharded, checkpoint, reference, replica_of
):
    """Prompts in chunks, beside rows that decode, in two micro-batches where there are stages."""
    architecture, arguments = MODELS[name]
    directory = checkpoint(architecture, **arguments)
    replica = replica_of(tp_size, pp_size, directory, 1 if sharded else 10**6)
    replica.parts = min(2, pp_size)
    assert_as_in_transformers(replica, reference(directory))


@pytest.mark.parametrize(
    ("name", "tp_size", "pp_size", "sharded"),
    [case if case[0] == "sinks" else pytest.param(*case, marks=pytest.mark.slow) for case in EXPERT_CASES],
)
def test_ranks_with_whole_experts_give_the_tokens_of_transformers(
    name, tp_size, pp_size, sharded, checkpoint, reference, replica_of
):
    """A rank has some of the experts, and the other ranks' tokens pass through them too."""
    architecture, arguments = MODELS[name]
    directory = checkpoint(architecture, **arguments)
    replica = replica_of(tp_size, pp_size, directory, 1 if sharded else 10**6, expert_parallel=True)
    replica.parts = min(2, pp_size)
    assert_as_in_transformers(replica, reference(directory))


def assert_as_in_transformers(replica, model: torch.nn.Module) -> None:
    """Fail unless greedy tokens are those of ``model``, and log-probabilities are within 1e-4."""
    driver, prompts = Driver(replica), [prompt_of(length, length) for length in LENGTHS]
    answers = driver.generate(prompts, TOKENS, chunk=20, logprobs=True)
    for slot, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        logits = expected_logits(model, prompt, tokens)
        assert logits.argmax(-1).tolist() == tokens
        chosen = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(driver.logprobs[slot]), chosen, atol=1e-4, rtol=0)


SAMPLING = (
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.8, "logprobs": True},
    {"temperature": 1.3, "seed": 3, "sample_index": 4, "top_k": 30, "min_p": 0.01},
    {"logprobs": True, "top_logprobs": 3},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    {
        "logit_bias_token_ids": np.array([7, 300]),
        "logit_bias_values": np.array([3.0, -3.0], np.float32),
        "logprobs": True,
    },
)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "sharded"),
    quick_if(
        lambda tp_size, pp_size, sharded: (tp_size, pp_size, sharded) in {(2, 1, 1), (1, 2, 1), (2, 2, 10**6)},
        [(2, 1, 1), (2, 1, 10**6), (1, 2, 1), (2, 2, 1), (2, 2, 10**6)],
    ),
)
def test_every_kind_of_sampling_gives_what_one_rank_gives(tp_size, pp_size, sharded, checkpoint, replica_of):
    directory = checkpoint("llama", **SIZES)
    runner, replica = alone(directory), replica_of(tp_size, pp_size, directory, sharded)
    driver, rows = Driver(runner), len(SAMPLING)
    lengths = [5 + 3 * row for row in range(rows)]
    admissions = tuple(
        admission(row, prompt_of(lengths[row], row), [2 * row, 2 * row + 1], **SAMPLING[row]) for row in range(rows)
    )
    plans = [
        driver.plan(admissions=admissions, batch=batch(range(rows), lengths), micro_batch_rows=cut(rows, 3)),
        driver.plan(batch=batch(range(rows)), micro_batch_rows=cut(rows, 2)),
        *[driver.plan() for _ in range(6)],
    ]
    for number, plan in enumerate(plans):
        object.__setattr__(plan, "step", number + 1)
    runner.reset()
    same(run_on(runner, plans), replica.run_all(plans))


@pytest.mark.parametrize("parts", [9, pytest.param(128, marks=pytest.mark.slow)])
def test_no_stage_waits_for_a_step_that_may_never_come(parts, checkpoint, replica_of):
    """The last stage hands tokens back for every micro-batch; the first takes them when it has use for them."""
    directory = checkpoint("llama", **SIZES)
    replica = replica_of(1, 2, directory, max_seqs_per_forward=parts, max_tokens_per_forward=parts)
    prompts = [prompt_of(1, slot) for slot in range(parts)]
    admissions = tuple(admission(slot, prompts[slot], [slot % 64]) for slot in range(parts))
    plan = replace(
        Driver(replica).plan(admissions=admissions, batch=batch(range(parts))), micro_batch_rows=(1,) * parts
    )
    for _ in range(2):
        replica.reset()
        assert len(replica.run_all([plan])[0][0].sampled.slots) == parts


def test_stages_may_have_any_numbers_of_layers(checkpoint, reference, replica_of):
    directory, prompt = checkpoint("llama", **SIZES), prompt_of(30)
    for layers in ((3, 1), (1, 3)):
        driver = Driver(replica_of(1, 2, directory, pp_layers=layers))
        (tokens,) = driver.generate([prompt], TOKENS)
        assert expected_logits(reference(directory), prompt, tokens).argmax(-1).tolist() == tokens


def test_a_model_without_weights_is_the_same_on_any_number_of_ranks(checkpoint, replica_of):
    directory, prompt = checkpoint("llama", **SIZES), prompt_of(30)
    seen = []
    for grid in ((2, 1), (1, 2), (4, 1)):
        driver = Driver(replica_of(*grid, directory, load_format="dummy"))
        seen.append(driver.generate([prompt], TOKENS, logprobs=True))
        seen.append([round(value, 4) for value in driver.logprobs[0]])
    assert seen[:2] == seen[2:4] == seen[4:]


@pytest.mark.parametrize("kind", ["fp8", pytest.param("int8", marks=pytest.mark.slow)])
def test_eight_bit_weights_are_split_too(kind, checkpoint, replica_of):
    """Near the exact ones, as on one rank; ranks scale their own parts of a row, so not equal to one rank's."""
    directory = checkpoint("llama", **SIZES | {"intermediate_size": 128, "vocab_size": 416})
    prompt = prompt_of(40)
    exact, quantized = [], []
    for found, quantization in ((exact, "none"), (quantized, kind)):
        for sharded in (1, 10**6):
            replica = replica_of(2, 1, directory, sharded, quantization=quantization)
            plan = Driver(replica).plan(admissions=(admission(0, prompt, [0, 1, 2]),), batch=batch([0], [40]))
            found.append(replica.run_all([plan])[0][1])
    torch.testing.assert_close(*exact, atol=1e-4, rtol=0)
    assert 0 < (quantized[0] - exact[0]).norm() / exact[0].norm() < 0.15
    torch.testing.assert_close(*quantized, atol=1e-3, rtol=0)


def test_logits_that_are_not_numbers_fail_their_row_only(checkpoint, replica_of, pool):
    directory = checkpoint("llama", **SIZES)
    replica = replica_of(2, 2, directory)
    driver, prompts = Driver(replica), [prompt_of(20, 1), prompt_of(20, 2)]
    both = tuple(admission(slot, prompts[slot], [2 * slot, 2 * slot + 1]) for slot in (0, 1))
    driver.run(admissions=both, batch=batch([0, 1], [20, 20]))
    pool.run(spoil_page, 2, 2, 0)
    for _ in range(2):  # the first stage gets token 0 for it and goes on
        assert driver.run(batch=batch([0, 1])).sampled.finite.tolist() == [False, True]
    again = driver.run(releases=[0], admissions=(admission(0, prompts[0], [4, 5]),), batch=batch([0], [20])).sampled
    assert again.finite.tolist() == [True]


def spoil_page(ranks, page: int) -> None:
    """A job."""
    from tests.worker.parallel import jobs

    jobs.booted.runner.cache.keys[0][page].fill_(float("nan"))
