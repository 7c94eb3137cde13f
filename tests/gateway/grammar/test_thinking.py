"""A thinking budget beside a grammar, of the real worker: the form begins behind the forced end."""

import json

import pytest

from tests.gateway.grammar.conftest import start
from tests.gateway.parrot import QWEN, THINKING_TOKENS

pytestmark = pytest.mark.slow

BEGIN, END = THINKING_TOKENS.values()
SCHEMA = {
    "type": "object",
    "properties": {"tall": {"type": "boolean"}},
    "required": ["tall"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
OPENED = {"chat_template_kwargs": {"open_thoughts": True}}


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    """Its tokenizer has tokens for the marks."""
    running = start(tmp_path_factory.mktemp("marked"), QWEN, thinking_tokens=True)
    running.wait_ready()
    yield running
    running.stop()


@pytest.mark.parametrize("temperature", [0, 1.5])
@pytest.mark.parametrize("budget", [0, 5, 12])
def test_a_schema_holds_behind_thoughts_that_were_ended(marked, no_blanks, budget, temperature):
    body = {"temperature": temperature, "seed": 3, "n": 3, "max_tokens": 60, "logit_bias": no_blanks, **OPENED}
    body |= {"thinking_token_budget": budget, "response_format": FORM, "return_token_ids": True}
    response = marked.chat(**body)
    assert response.status_code == 200, response.text
    for choice in response.json()["choices"]:
        tokens = choice["token_ids"]
        assert budget <= tokens.index(END) <= budget + 3  # a character may be completed first
        assert json.loads(choice["message"]["content"]).keys() == {"tall"}
        assert choice["finish_reason"] == "stop"


def test_without_a_grammar_the_end_comes_at_once(marked):
    free = marked.chat(seed=3, max_tokens=30, return_token_ids=True, **OPENED).json()["choices"][0]["token_ids"]
    assert END not in free
    body = {"seed": 3, "max_tokens": 30, "return_token_ids": True, "logprobs": True, "logprobs_mode": "processed"}
    [choice] = marked.chat(thinking_token_budget=7, **body, **OPENED).json()["choices"]
    assert choice["token_ids"][:8] == [*free[:7], END]
    assert len(choice["token_ids"]) == 30
    assert choice["logprobs"]["content"][7]["logprob"] == 0
