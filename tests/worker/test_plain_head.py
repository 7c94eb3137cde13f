"""Tokens of rows with at most a temperature from one compiled function on a CPU, against those of the logits."""

import numpy as np
import pytest
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.panels import PanelLinear
from services.worker.sampling.draw import draw
from services.worker.sampling.plain_cpu import PlainHead
from services.worker.step.noise import NOISE_BLOCK, row_keys, scales_of
from tests.quick import quick_if
from tests.worker.driver import Driver, admission, batch
from tests.worker.test_panels import random
from tests.worker.test_quantization import fill

VOCAB, HIDDEN = 150, 64  # the last panel is not full
HEADS = {
    "float32": lambda: PanelLinear(HIDDEN, VOCAB),
    "bfloat16": lambda: PanelLinear(HIDDEN, VOCAB, dtype=torch.bfloat16),
    "int8": lambda: IntegerLinear(HIDDEN, VOCAB, bits=8),
    "int4": lambda: IntegerLinear(HIDDEN, VOCAB, bits=4),
}


@pytest.fixture(scope="module", params=quick_if(lambda kind: kind != "int4", HEADS))
def head(request):
    return fill(HEADS[request.param](), random(VOCAB, HIDDEN), None)


def keys_of(rows: int) -> np.ndarray:
    seeds, indices = np.arange(rows, dtype=np.uint64) * 7919, np.arange(rows, dtype=np.uint64) % 3
    return row_keys(seeds, indices, np.full(rows, 50, np.uint64))


def chosen_by(head, hidden: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the results for greedy rows."""
    return PlainHead(head)(hidden, np.zeros(len(hidden), np.float32), keys_of(len(hidden)))


def expected_tokens(head, hidden: torch.Tensor, scales: np.ndarray, keys: np.ndarray) -> list[int]:
    """Return the tokens from logits, of as many rows at a time as in the compiled function."""
    logits = torch.cat([head(part) for part in hidden.split(64)])
    drawn = draw(logits, torch.from_numpy(scales), None, torch.from_numpy(keys))
    return torch.where(torch.from_numpy(scales) > 0, drawn, logits.argmax(dim=1)).tolist()


@pytest.mark.parametrize("rows", [1, 5, 64, 130])
def test_tokens_of_greedy_rows_are_the_most_likely_ones(head, rows):
    hidden = random(rows, HIDDEN, seed=1)
    tokens, finite = chosen_by(head, hidden)
    assert tokens.tolist() == head(hidden).argmax(dim=1).tolist()
    assert finite.all()


@pytest.mark.parametrize("vocab", [150, NOISE_BLOCK, NOISE_BLOCK + 1, 3 * NOISE_BLOCK - 300])
def test_tokens_of_other_rows_are_those_that_are_drawn_from_logits(vocab):
    """Some rows are greedy. Low temperatures, and logits of any size, change nothing."""
    rows = 600
    head, hidden = fill(PanelLinear(HIDDEN, vocab), random(vocab, HIDDEN), None), random(rows, HIDDEN, seed=1)
    hidden *= torch.logspace(-3, 0.5, rows).unsqueeze(1)
    temperatures = np.tile(np.array([0.0, 1e-3, 0.3, 1.0, 2.5], np.float32), rows // 5)
    scales, keys = scales_of(temperatures), keys_of(rows)
    tokens, finite = PlainHead(head)(hidden, scales, keys)
    assert finite.all()
    assert tokens.tolist() == expected_tokens(head, hidden, scales, keys)
    assert len(set(tokens.tolist())) > 50


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_whose_logits_are_not_finite_are_found(head, bad, temperature):
    hidden, scales = random(3, HIDDEN, seed=1), scales_of(np.full(3, temperature, np.float32))
    hidden[1, 5] = bad
    tokens, finite = PlainHead(head)(hidden, scales, keys_of(3))
    assert finite.tolist() == [True, False, True]
    good = [0, 2]
    assert tokens[good].tolist() == expected_tokens(head, hidden[good], scales[good], keys_of(3)[good])


def test_the_first_of_equal_logits_is_chosen():
    weight = torch.zeros(VOCAB, HIDDEN)
    weight[[70, 140]] = 1
    head = fill(PanelLinear(HIDDEN, VOCAB), weight, None)
    assert chosen_by(head, torch.ones(1, HIDDEN))[0].tolist() == [70]


@pytest.mark.parametrize(
    ("others", "calls"),
    [
        ({}, 1), ({"temperature": 1.0}, 1), ({"temperature": 1.0, "top_p": 0.5}, 0), ({"logprobs": True}, 0),
        ({"presence_penalty": 0.5}, 0),
    ],
)  # fmt: skip
def test_only_steps_of_plain_rows_use_the_compiled_head(others, calls, checkpoint, monkeypatch):
    """If a row has other settings, the tokens of all rows are sampled from logits."""
    called, call = [], PlainHead.__call__
    monkeypatch.setattr(PlainHead, "__call__", lambda *args, **kwargs: called.append(1) or call(*args, **kwargs))
    flags = {"device": "cpu", "kv_cache_num_tokens": 1024, "torch_num_threads": 1}
    runner = boot(WorkerConfig(model=str(checkpoint("llama")), **flags)).runner
    called.clear()
    driver = Driver(runner)
    admissions = admission(0, [3, 4], [0]), admission(1, [5], [1], **others)
    driver.run(admissions=admissions, batch=batch([0, 1], [2, 1]))
    driver.run(batch=batch([0, 1]))
    assert len(called) == 2 * calls
    assert [len(driver.tokens[slot]) for slot in (0, 1)] == [2, 2]
    runner.close()


def test_a_row_draws_the_same_tokens_beside_rows_with_other_settings(checkpoint):
    """The other row's log-probabilities take all rows of the step through the logits."""
    flags = {"device": "cpu", "kv_cache_num_tokens": 1024, "torch_num_threads": 1}
    runner = boot(WorkerConfig(model=str(checkpoint("llama")), **flags)).runner
    found = []
    for others in ({}, {"logprobs": True}):
        runner.reset()
        driver = Driver(runner)
        admissions = admission(0, [3, 4], [0, 1], temperature=1.0, seed=7), admission(1, [5], [2, 3], **others)
        driver.run(admissions=admissions, batch=batch([0, 1], [2, 1]))
        for _ in range(20):
            driver.run(batch=batch([0, 1]))
        found.append(driver.tokens[0])
    assert found[0] == found[1]
    assert len(set(found[0])) > 5
    runner.close()
