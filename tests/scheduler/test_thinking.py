"""A thinking budget by the contract: which section it is of, and what counts."""

import pytest

from tests.fakes.worker import FakeWorker, reply_script
from tests.scheduler.service import start
from tokasaurus.scheduler.v1 import generate_pb2 as g

BEGIN, END = 60, 61
REPLY = [*range(100, 130)]
STOPPING = g.Stopping(max_tokens=12)


def budget(tokens: int, **more) -> g.Sampling:
    known = {"begin_token_id": BEGIN, "end_token_id": END}
    return g.Sampling(temperature=0, thinking=g.ThinkingBudget(tokens=tokens, **known | more))


@pytest.fixture
async def service():
    async with start(worker=FakeWorker(script=reply_script(REPLY))) as running:
        yield running


async def ask(service, prompt: list[int], sampling: g.Sampling, n: int = 1, **more) -> list[list[int]]:
    tokens = g.TokenPrompt(token_ids=prompt)
    samples = await service.generate(tokens=tokens, sampling=sampling, stopping=STOPPING, n=n, **more)
    return [samples[index].tokens for index in range(n)]


ENDED = [*REPLY[:5], END, *REPLY[:6]]  # the script begins again behind what it did not say


@pytest.mark.parametrize("n", [1, 3])
async def test_the_section_of_a_prompt_that_opens_it_is_ended(service, n):
    assert await ask(service, [50, BEGIN], budget(5), n) == [ENDED] * n
    assert await ask(service, [50, END], budget(5, opened=True), n) == [ENDED] * n
    assert await ask(service, [50, BEGIN, 51], budget(12), n) == [REPLY[:12]] * n


@pytest.mark.parametrize(
    ("prompt", "more"),
    [([50, 51], {}), ([BEGIN, 50, END], {}), ([50, BEGIN], {"opened": False}), ([50, 51], {"opened": False})],
)
async def test_an_answer_without_a_section_is_as_it_is(service, prompt, more):
    assert await ask(service, prompt, budget(5, **more)) == [REPLY[:12]]


async def test_a_section_that_the_answer_opens_is_ended(service):
    own = budget(3, begin_token_id=REPLY[1])
    assert (await ask(service, [50], own))[0][:6] == [*REPLY[:5], END]


@pytest.mark.parametrize("generated", [1, 4, 5, 6, 9])
async def test_what_an_earlier_scheduler_generated_counts(service, generated):
    """And the section is still the one of the prompt, whose end is before what was generated."""
    prompt = [50, BEGIN, *ENDED[:generated]]
    resume = g.Resume(generated_tokens=generated)
    assert await ask(service, prompt, budget(5), resume=resume) == [ENDED[generated:]]
