"""Log-probabilities of prompts on several ranks: those of one, and of transformers."""

import pytest
import torch

from services.worker.described.ranks import Ranks
from services.worker.sampling import prompt_logprobs
from services.worker.step.output import StepOutput
from tests.quick import quick_if
from tests.worker.driver import Driver, admission, batch
from tests.worker.parallel.cases import SIZES, prompt_of
from tests.worker.parallel.replica import alone
from tests.worker.scores import check_scores, same_scores

PROMPTS = {1: prompt_of(45, 1), 2: prompt_of(23, 2), 3: prompt_of(30, 3)}
TOP = {1: 3, 2: 0, 3: 1}


def score(driver: Driver) -> list[StepOutput]:
    """``PROMPTS``, in chunks that differ, beside a sequence that did not ask."""
    driver.reset()
    asked = {
        slot: admission(slot, prompt, range(4 * slot, 4 * slot + 4), prompt_logprobs=TOP[slot], temperature=0.8)
        for slot, prompt in PROMPTS.items()
    }
    return [
        driver.run(admissions=(admission(0, [5], [0, 1]), asked[1]), batch=batch([0, 1], [1, 20])),
        driver.run(admissions=(asked[2],), batch=batch([1, 0, 2], [24, 1, 20])),
        driver.run(admissions=(asked[3],), batch=batch([2, 3, 0, 1], [3, 30, 1, 1])),
        driver.run(batch=batch(range(4))),
    ]


def slice_by(ranks: Ranks, elements: int) -> None:
    """Set the number of logits that are computed at once. This is a job."""
    prompt_logprobs.SLICE_ELEMENTS = elements


@pytest.mark.parametrize("elements", [1600, 4 * 1024 * 1024])
@pytest.mark.parametrize(
    ("tp_size", "pp_size", "sharded"),
    quick_if(
        lambda tp_size, pp_size, sharded: tp_size + pp_size == 3,
        [(2, 1, 10**6), (2, 1, 1), (1, 2, 10**6), (2, 2, 10**6), (2, 2, 1)],
    ),
)
def test_ranks_score_as_one_does(tp_size, pp_size, sharded, elements, checkpoint, reference, replica_of):
    """In one slice of rows and in several, in two micro-batches where there are stages."""
    directory = checkpoint("llama", **SIZES)
    replica = replica_of(tp_size, pp_size, directory, sharded)
    replica.parts = min(2, pp_size)
    replica.call(slice_by, elements)
    try:
        found = score(Driver(replica))
    finally:
        replica.call(slice_by, prompt_logprobs.SLICE_ELEMENTS)
    expected = score(Driver(alone(directory)))
    same_scores(expected, found)
    for each, other in zip(expected, found, strict=True):
        assert other.sampled.token_ids.tolist() == each.sampled.token_ids.tolist()
    for slot, prompt in PROMPTS.items():
        with torch.inference_mode():
            table = reference(directory)(torch.tensor([prompt])).logits[0].log_softmax(-1)
        parts = [part for output in found for part in output.scored if part.slot == slot]
        check_scores(parts, prompt, table, TOP[slot], 1e-4)
