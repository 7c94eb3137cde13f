"""The most likely tokens from one compiled function on a CPU, against those of the logits."""

import pytest
import torch

from services.common.config import WorkerConfig
from services.worker.boot.common import boot
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.panels import PanelLinear
from services.worker.sampling.greedy_cpu import GreedyHead
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


@pytest.fixture(scope="module", params=HEADS)
def head(request):
    return fill(HEADS[request.param](), random(VOCAB, HIDDEN), None)


@pytest.mark.parametrize("rows", [1, 5, 64, 130])
def test_tokens_are_the_most_likely_ones(head, rows):
    hidden = random(rows, HIDDEN, seed=1)
    tokens, finite = GreedyHead(head)(hidden)
    assert tokens.tolist() == head(hidden).argmax(dim=1).tolist()
    assert finite.all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_rows_whose_logits_are_not_finite_are_found(head, bad):
    hidden = random(3, HIDDEN, seed=1)
    hidden[1, 5] = bad
    tokens, finite = GreedyHead(head)(hidden)
    assert finite.tolist() == [True, False, True]
    assert tokens[[0, 2]].tolist() == head(hidden[[0, 2]]).argmax(dim=1).tolist()


def test_the_first_of_equal_logits_is_chosen():
    weight = torch.zeros(VOCAB, HIDDEN)
    weight[[70, 140]] = 1
    head = fill(PanelLinear(HIDDEN, VOCAB), weight, None)
    assert GreedyHead(head)(torch.ones(1, HIDDEN))[0].tolist() == [70]


@pytest.mark.parametrize(
    ("others", "calls"),
    [({}, 1), ({"temperature": 1.0}, 0), ({"logprobs": True}, 0), ({"presence_penalty": 0.5}, 0)],
)
def test_only_steps_of_greedy_rows_use_the_compiled_head(others, calls, checkpoint, monkeypatch):
    """If a row has other settings, the tokens of all rows are sampled from logits."""
    called, call = [], GreedyHead.__call__
    monkeypatch.setattr(GreedyHead, "__call__", lambda *arguments: called.append(1) or call(*arguments))
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
