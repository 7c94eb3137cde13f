"""The fake follows grammars, so that what stands on it can rely on answers that match."""

import re

import pytest

from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeModel, FakeShape, reply_script
from tokasaurus.worker.v1 import plan_pb2

ONE_EACH = plan_pb2.Batch(slots=[0, 1])


def admission(slot: int, tokens: list[int], grammar: str, prompt_tokens: int = 0) -> plan_pb2.Admission:
    sampling = plan_pb2.SamplingSettings(parameters={"temperature": 0}, grammar=grammar)
    return plan_pb2.Admission(slot=slot, token_ids=tokens, pages=[slot], sampling=sampling, prompt_tokens=prompt_tokens)


def answers(model: FakeModel, *admissions: plan_pb2.Admission) -> list[str]:
    """The texts of slots 0 and 1, whose first token that ends is 0 or 1."""
    counts = [len(each.token_ids) for each in admissions]
    batches = [plan_pb2.Batch(slots=[0, 1], token_counts=counts), *[ONE_EACH] * 9]
    tokens = [], []
    for step, batch in enumerate(batches, 1):
        added = admissions if step == 1 else ()
        result = model.apply(plan_pb2.StepPlan(step=step, admissions=added, batch=batch))
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            tokens[slot].append(token)
    vocabulary = Tokenizer.load("builtin").vocabulary
    ended = (each[: next(i for i, token in enumerate(each) if token in (0, 1))] for each in tokens)
    return [vocabulary.text_bytes(each).decode() for each in ended]


@pytest.mark.parametrize("script", [None, reply_script([40, 41])])
def test_answers_match(script):
    one, other = answers(
        FakeModel(FakeShape(), script),
        admission(0, [5, 6], "start: /[a-f]{3,6}/"),
        admission(1, [7], 'start: "yes" | "no"'),
    )
    assert re.fullmatch("[a-f]{3,6}", one)
    assert other in ("yes", "no")


def test_what_is_resumed_goes_on():
    said = Tokenizer.load("builtin").encode("ab")
    rows = admission(0, [5, 6, *said], "start: /ab[xy]{2}/", 2), admission(1, [7], 'start: "n"')
    one, _ = answers(FakeModel(FakeShape()), *rows)
    assert re.fullmatch("[xy]{2}", one)


def test_a_grammar_that_cannot_be_compiled_fails_its_slot():
    model = FakeModel(FakeShape())
    rows = admission(0, [5], "start: (("), admission(1, [7], "")
    result = model.apply(plan_pb2.StepPlan(step=1, admissions=rows, batch=ONE_EACH))
    assert [failure.slot for failure in result.failures] == [0]
    assert list(result.slots) == [1]
