"""Log-probabilities of prompts: those of transformers, however the prompt is cut into steps, shards and slices."""

import dataclasses

import numpy as np
import pytest
import torch

from services.common.errors import InvalidRequest
from services.worker.sampling import prompt_logprobs
from tests.worker.driver import Driver, admission, batch
from tests.worker.test_generation import prompt_of


def score(driver: Driver, prompt: list[int], chunk: int, top: int = 3, cached: int = 0, **sampling) -> list:
    """The parts for ``prompt``, in slot 1 beside another sequence that did not ask."""
    size = driver.runner.limits.page_size
    pages = range(1, 2 + len(prompt) // size)
    wanted = admission(1, prompt, pages, cached_tokens=cached, prompt_logprobs=top, **sampling)
    parts = []
    for start in range(cached, len(prompt), chunk):
        if start == cached:
            admissions = (admission(0, [5], [0, *range(50, 56)]), wanted) if driver.steps == 0 else (wanted,)
        else:
            admissions = ()
        count = min(chunk, len(prompt) - start)
        output = driver.run(admissions=admissions, batch=batch([0, 1], [1, count]))
        assert all(part.slot == 1 for part in output.scored)
        parts += output.scored
    return parts


def expected(model, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize("chunk", [100, 7, 1])
@pytest.mark.parametrize("elements", [1, 4 * 1024 * 1024])
@pytest.mark.parametrize("threads", [1, 2])
def test_they_are_those_of_transformers(checkpoint, reference, runner_for, monkeypatch, chunk, elements, threads):
    monkeypatch.setattr(prompt_logprobs, "SLICE_ELEMENTS", elements)
    prompt = prompt_of(77)
    table = expected(reference(checkpoint()), prompt)
    bias = {"logit_bias_token_ids": np.array([5]), "logit_bias_values": np.array([50.0], np.float32)}
    parts = score(runner_for(torch_num_threads=threads), prompt, chunk, repetition_penalty=1.7, temperature=2.0, **bias)
    places = [place for part in parts for place in range(part.start, part.start + len(part.logprobs))]
    assert places == list(range(1, 77))
    wanted = table[torch.arange(76), torch.tensor(prompt[1:])]
    found = torch.from_numpy(np.concatenate([part.logprobs for part in parts]))
    assert torch.allclose(found, wanted, atol=1e-4)
    ranks = (table[:-1] > wanted[:, None]).sum(1) + 1
    assert np.concatenate([part.ranks for part in parts]).tolist() == ranks.tolist()
    best = table[:-1].topk(3)
    assert np.concatenate([part.top.token_ids for part in parts]).tolist() == best.indices.flatten().tolist()
    assert np.allclose(np.concatenate([part.top.logprobs for part in parts]), best.values.flatten(), atol=1e-4)


def test_only_what_is_computed_of_the_prompt_has_them(checkpoint, reference, runner_for):
    driver, prompt = runner_for(torch_num_threads=1), prompt_of(40)
    score(driver, prompt, chunk=40)
    driver.run(releases=[1], batch=batch([0]))
    parts = score(driver, prompt, chunk=40, cached=16, top=0)
    assert [(part.start, len(part.logprobs), part.top.counts.tolist()) for part in parts] == [(17, 23, [0] * 23)]
    wanted = expected(reference(checkpoint()), prompt)[torch.arange(16, 39), torch.tensor(prompt[17:])]
    assert np.allclose(parts[0].logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("chunk", [40, 7, 1])
@pytest.mark.parametrize(("start", "cached"), [(0, 0), (1, 0), (9, 0), (33, 32), (34, 32), (39, 32), (39, 0)])
def test_only_tokens_from_the_start_are_scored(checkpoint, reference, runner_for, start, cached, chunk):
    """With what they have where the whole prompt is computed."""
    driver, prompt = runner_for(), prompt_of(40)
    score(driver, prompt, chunk=40)
    driver.run(releases=[1], batch=batch([0]))
    parts = score(driver, prompt, chunk=chunk, cached=cached, prompt_logprobs_start=start)
    places = [place for part in parts for place in range(part.start, part.start + len(part.logprobs))]
    assert places == list(range(max(1, start), 40))
    wanted = expected(reference(checkpoint()), prompt)[torch.tensor(places) - 1, torch.tensor(prompt)[places]]
    assert np.allclose(np.concatenate([part.logprobs for part in parts]), wanted, atol=1e-4)


def test_a_start_behind_the_prompt_is_refused(runner_for):
    wanted = admission(1, [7, 8], [1], prompt_logprobs=0, prompt_logprobs_start=2)
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start=2: expected less than the 2 tokens of the prompt"):
        runner_for().run(admissions=(wanted,), batch=batch([1], [2]))


def test_generated_tokens_have_none(runner_for):
    driver, prompt = runner_for(torch_num_threads=1), prompt_of(20)
    admitted = admission(1, prompt, [1, 2], prompt_logprobs=1)
    resumed = dataclasses.replace(admitted, prompt_tokens=12)
    output = driver.run(admissions=(resumed,), batch=batch([1], [20]))
    assert [(part.start, len(part.logprobs)) for part in output.scored] == [(1, 11)]
    assert driver.run(batch=batch([1])).scored == ()


def test_a_prompt_of_one_token_has_none(runner_for):
    assert runner_for().run(admissions=(admission(1, [7], [1], prompt_logprobs=2),), batch=batch([1])).scored == ()


def test_more_than_the_worker_has_is_refused(runner_for):
    with pytest.raises(InvalidRequest, match="prompt_logprobs=21: expected at most 20"):
        runner_for().run(admissions=(admission(1, [7], [1], prompt_logprobs=21),), batch=batch([1]))
