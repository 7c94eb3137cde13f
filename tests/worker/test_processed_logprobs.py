"""Processed log-probabilities are those of the distribution that a token was drawn from: transformers' scores."""

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.worker.step.output import Sampled
from tests.quick import quick_if
from tests.worker.interpreter import needs_triton
from tests.worker.test_generation import prompt_of
from tests.worker.test_masked_sampling import allow, allowed_tokens
from tests.worker.test_sampling_kernels import VOCAB, Case, assert_same, hot


def fused(case: Case) -> Sampled:
    return case.fused(dtype=torch.float32)


RUNS = [Case.on_cpu, fused]
pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready")]
ASKED = {"logprobs": True, "top_logprobs": 5, "processed_logprobs": True}
KINDS = {
    "warm": {},
    "top_k": {"top_k": 7},
    "fewer than asked for": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "all": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.7, "top_k": 20, "top_p": 0.7},
}


def transformers_scores(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    temperature=0.0,
    top_k=0,
    top_p=1.0,
    min_p=0.0,
    repetition_penalty=1.0,
) -> torch.Tensor:
    """The processed scores ``[1, vocab]`` of ``generate`` for ``logits [1, vocab]``, in the order of its processors."""
    processors = LogitsProcessorList()
    if repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature:
        processors.append(TemperatureLogitsWarper(float(temperature)))
        processors += [TopKLogitsWarper(top_k)] if top_k else []
        processors += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        processors += [MinPLogitsWarper(min_p)] if min_p else []
    return processors(tokens, logits).log_softmax(-1)


def entries(sampled: Sampled) -> list[tuple[int, int, float, list[int], list[float]]]:
    """(slot, token, its log-probability, the most likely tokens, theirs) of each row."""
    ends = np.cumsum(sampled.top.counts).tolist()
    starts = [0, *ends[:-1]]
    columns = sampled.slots.tolist(), sampled.token_ids.tolist(), sampled.logprobs.tolist(), starts, ends
    return [
        (slot, token, logprob, sampled.top.token_ids[start:end].tolist(), sampled.top.logprobs[start:end].tolist())
        for slot, token, logprob, start, end in zip(*columns, strict=True)
    ]


@pytest.mark.parametrize(
    "sampling",
    quick_if(lambda sampling: len(sampling) < 2 or "repetition_penalty" in sampling, KINDS.values()),
    ids=KINDS,
)
@pytest.mark.parametrize("run", RUNS)
def test_they_are_the_processed_scores_of_transformers(run, sampling):
    rows = hot(12, **sampling, **ASKED)
    rows[3]["temperature"] = rows[4]["temperature"] = 0.0
    case = Case(rows)
    case.logits = 3 * torch.randn(case.logits.shape, generator=torch.Generator().manual_seed(2))  # without equal ones
    table, found = case.table, run(case)
    for row, (slot, token, logprob, top_ids, top) in enumerate(entries(found)):
        pages = torch.from_numpy(table.page_table[slot, :2]).long()
        text = case.tokens[pages].flatten()[:13].long()
        temperature = table.temperature[slot]
        expected = transformers_scores(case.logits[row][None].float(), text[None], temperature=temperature, **sampling)
        assert logprob == pytest.approx(float(expected[0, token]), abs=1e-5)
        best = expected[0].topk(5).values
        drawable = best[best > -torch.inf].tolist()
        assert top == pytest.approx(drawable, abs=1e-5)
        assert [float(expected[0, each]) for each in top_ids] == pytest.approx(drawable, abs=1e-5)


@pytest.mark.parametrize(
    "sampling",
    quick_if(lambda sampling: sampling in ({}, {"min_p": 0.05}, {"top_k": 3}), KINDS.values()),
    ids=KINDS,
)
@pytest.mark.parametrize("vocab", [90, pytest.param(VOCAB, marks=pytest.mark.slow)])
def test_rows_of_either_mode_stand_beside_each_other(vocab, sampling):
    """And rows that ask for none; and the tokens are those that are drawn without log-probabilities."""
    rows = hot(24, **sampling)
    for slot, row in enumerate(rows):
        row |= {"logprobs": slot % 3 > 0, "top_logprobs": slot % 5, "processed_logprobs": slot % 3 == 2}
        if slot % 4 == 0:
            row |= {"logit_bias_token_ids": np.array([7, 30]), "logit_bias_values": np.array([3, -1], np.float32)}
    case, silent = Case(rows, vocab), Case(rows, vocab)
    silent.table.logprobs[:] = False
    expected = case.on_cpu()
    assert expected.token_ids.tolist() == silent.on_cpu().token_ids.tolist()
    assert_same(case.fused(), expected)
    assert_same(case.fused(padding=9, slice_elements=16 * vocab, chunk_rows=3), expected)


@pytest.mark.parametrize("run", RUNS)
def test_tokens_that_a_grammar_rules_out_have_none(run):
    case = Case([row | {"grammar": "some"} for row in hot(8, **ASKED)])
    for slot in range(8):
        allow(case, slot, [5, 6 + slot, 1100, 2599][: 1 + slot % 4])
    logits = case.logits.float()
    for row, (slot, token, logprob, top_ids, top) in enumerate(entries(run(case))):
        allowed = sorted(allowed_tokens(case, slot))
        expected = (logits[row, allowed] / float(case.table.temperature[slot])).log_softmax(-1)
        assert sorted(top_ids) == allowed
        assert top == pytest.approx(expected.sort(descending=True).values.tolist(), abs=1e-5)
        assert logprob == pytest.approx(float(expected[allowed.index(token)]), abs=1e-5)


@pytest.mark.parametrize("run", RUNS)
def test_a_greedy_row_has_no_temperature_and_no_truncation(run):
    """As in vLLM, and in transformers with ``do_sample=False``."""
    case = Case([{"top_k": 2, "top_p": 0.1, "min_p": 0.5, **ASKED}] * 4)
    expected = case.logits.float().log_softmax(-1)
    for row, (_, token, logprob, _, top) in enumerate(entries(run(case))):
        assert token == int(expected[row].argmax())
        best = expected[row].topk(5).values.tolist()
        assert [logprob, *top] == pytest.approx([best[0], *best], abs=1e-5)


@pytest.mark.parametrize(("temperature", "top_k"), [(0.7, 5), (1.6, 0), (0.0, 0)])
def test_a_model_gives_those_of_transformers(checkpoint, reference, runner_for, temperature, top_k):
    """Whole answers. transformers computes the logits, which differ by up to 1e-4, and processes them."""
    prompts, model = [prompt_of(9), prompt_of(30)], reference(checkpoint())
    settings = {"temperature": temperature, "top_k": top_k, "repetition_penalty": 1.3}
    driver = runner_for()
    answers = driver.generate(prompts, 12, seed=5, logprobs=True, processed_logprobs=True, **settings)
    for slot, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = torch.tensor([prompt + answer])
        with torch.inference_mode():
            logits = model(text).logits[0].float()
        for place, token in enumerate(answer):
            at = len(prompt) + place
            scores = transformers_scores(logits[at - 1][None], text[:, :at], **settings)
            assert driver.logprobs[slot][place] == pytest.approx(float(scores[0, token]), abs=1e-4)
