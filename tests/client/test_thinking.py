"""``thinking_token_budget`` of a script: as over HTTP. The model says what the user said."""

import pytest

from services.client import LLM, SamplingParams
from tests.gateway.parrot import QWEN, THINKING_TOKENS, start_parrot

BEGIN, END = THINKING_TOKENS.values()
SAYS = [{"role": "user", "content": "<think> one two three four five</think>Done."}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    directory = tmp_path_factory.mktemp("thinker")
    running = start_parrot(directory, QWEN, thinking_tokens=True)
    with LLM(str(directory / "parrot"), address=running.scheduler_address) as made:
        yield made
    running.stop()


def test_thoughts_of_a_conversation_are_ended(llm):
    [free] = llm.chat([SAYS], SamplingParams(max_tokens=40))
    [limited] = llm.chat([SAYS], SamplingParams(max_tokens=40, thinking_token_budget=2))
    own, ended = free.outputs[0].token_ids, limited.outputs[0].token_ids
    assert own[0] == BEGIN
    assert ended == [*own[:3], END, *own[4:]]


def test_thoughts_that_a_prompt_opens_are_ended(llm):
    words = [300, 301, 302, 303]
    params = SamplingParams(max_tokens=4, temperature=0, thinking_token_budget=1)
    opened, closed = llm.generate([[BEGIN, 3, *words, 1, 4], [BEGIN, END, 3, *words, 1, 4]], params)
    assert opened.outputs[0].token_ids == [300, END, 302, 303]
    assert closed.outputs[0].token_ids == words
