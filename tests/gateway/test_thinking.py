"""``thinking_token_budget`` through HTTP. The model says what the user said."""

import pytest

from services.common.text.tokenizer import Tokenizer
from tests.gateway.parrot import QWEN, THINKING_TOKENS, start_parrot
from tests.gateway.test_errors import error_of
from tests.gateway.test_streaming import events

BEGIN, END = THINKING_TOKENS.values()
THOUGHTS = " one two three four five six"
SAYS = f"<think>{THOUGHTS}</think>Done."


@pytest.fixture(scope="module")
def thinker(tmp_path_factory):
    running = start_parrot(tmp_path_factory.mktemp("thinker"), QWEN, thinking_tokens=True)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def pieces(thinker) -> list[str]:
    """The tokens of THOUGHTS as text."""
    tokenizer = Tokenizer.load(str(thinker.directory / "parrot"))
    ids = tokenizer.encode(THOUGHTS, add_special_tokens=False)
    assert tokenizer.encode(SAYS, add_special_tokens=False)[: len(ids) + 2] == [BEGIN, *ids, END]
    return [tokenizer.vocabulary.text_bytes([token]).decode() for token in ids]


def model_of(thinker) -> str:
    with thinker.sdk() as client:
        return client.models.list().data[0].id


def said(text: str, **body) -> dict:
    return {"messages": [{"role": "user", "content": text}]} | body


def message(thinker, text: str = SAYS, **body) -> dict:
    response = thinker.chat(**said(text, **body))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]


@pytest.mark.parametrize("budget", [0, 1, 4])
def test_thoughts_are_ended_and_the_answer_goes_on(thinker, pieces, budget):
    """The parrot goes on behind the token that the end took the place of."""
    response = thinker.chat(**said(SAYS, thinking_token_budget=budget)).json()
    told = response["choices"][0]["message"]
    assert told.get("reasoning_content", "") == "".join(pieces[:budget]).strip()
    assert told["content"] == "".join(pieces[budget + 1 :]).lstrip() + "</think>Done."
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] == budget + 2  # the marks count there


def test_a_stream_and_its_samples(thinker, pieces):
    body = said(SAYS, thinking_token_budget=3, n=3, stop=["five"])
    chunks = events(thinker, "/v1/chat/completions", **body)
    for index in range(3):
        deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        parts = [delta["delta"].get("reasoning_content") or "" for delta in deltas]
        assert "".join(parts) == "".join(pieces[:3]).strip()
        content = "".join(delta["delta"].get("content") or "" for delta in deltas)
        assert content == "".join(pieces[4:]).partition("five")[0].lstrip()
        assert deltas[-1]["finish_reason"] == "stop"


def test_a_budget_that_is_not_used_up_changes_nothing(thinker, pieces):
    free = message(thinker)
    assert (free["reasoning_content"], free["content"]) == (THOUGHTS.strip(), "Done.")
    assert message(thinker, thinking_token_budget=len(pieces)) == free
    assert message(thinker, "No thoughts at all, just words.", thinking_token_budget=1)["content"].endswith("words.")


def test_a_section_that_the_prompt_opens(thinker, pieces):
    """The parrot leaves out as many tokens as the template has behind <|assistant|>: two."""
    opened = {"chat_template_kwargs": {"open_thoughts": True}}
    told = message(thinker, f"{THOUGHTS}</think>Done.", thinking_token_budget=2, **opened)
    assert told["reasoning_content"] == "".join(pieces[2:4]).strip()


def test_a_section_that_the_template_has_ended_is_within_any_budget(thinker):
    asked = {"text": 4 * THOUGHTS, "chat_template_kwargs": {"enable_thinking": False}}
    free = message(thinker, **asked)
    assert free["content"].endswith("five six")
    assert message(thinker, thinking_token_budget=0, **asked) == free


def test_completions_see_by_its_tokens_whether_a_prompt_opens_the_section(thinker):
    """The parrot's words are those of the user: <|user|>, words, <|end|>, <|assistant|>."""
    words = [300, 301, 302, 303]
    body = {"max_tokens": 4, "temperature": 0, "return_token_ids": True, "thinking_token_budget": 2}
    for prompt, expected in (
        ([BEGIN, 3, *words, 1, 4], [300, 301, END, 303]),
        ([BEGIN, END, 3, *words, 1, 4], words),
        ([3, BEGIN, *words, 1, 4], [BEGIN, 300, END, 302]),
    ):
        answer = thinker.complete(prompt=prompt, **body)
        assert answer.json()["choices"][0]["token_ids"] == expected, answer.text


def test_responses_take_it(thinker, pieces):
    response = thinker.post("/v1/responses", {"input": SAYS, "thinking_token_budget": 2}).json()
    reasoning, words = response["output"]
    assert reasoning["content"][0]["text"] == "".join(pieces[:2]).strip()
    assert words["content"][0]["text"].endswith("Done.")


def test_messages_take_it_as_their_budget(thinker, pieces):
    thinking = {"type": "enabled", "budget_tokens": 2}
    response = thinker.post("/v1/messages", said(SAYS, model=model_of(thinker), max_tokens=40, thinking=thinking))
    assert response.status_code == 200, response.text
    assert "x-toka-ignored-params" not in response.headers
    thoughts, words = response.json()["content"]
    assert thoughts["thinking"] == "".join(pieces[:2]).strip()
    assert words["text"].endswith("Done.")
    both = said(SAYS, model=model_of(thinker), max_tokens=40, thinking=thinking, thinking_token_budget=3)
    assert "leave one of them out" in thinker.post("/v1/messages", both).json()["error"]["message"]


def test_a_model_without_a_section_refuses_it(deployment, qwen):
    for server, reason in ((deployment, "has no reasoning section"), (qwen, "no single tokens for <think> and")):
        for response in (
            server.chat(thinking_token_budget=5),
            server.complete(prompt="x", thinking_token_budget=5),
        ):
            error = error_of(response, 400)
            assert (error["param"], error["code"]) == ("thinking_token_budget", "unsupported_parameter")
            assert reason in error["message"]
            assert "leave it out" in error["message"]


@pytest.mark.parametrize("budget", [-1, 1.5, "5", True])
def test_only_a_number_of_tokens_is_a_budget(thinker, budget):
    assert error_of(thinker.chat(thinking_token_budget=budget), 400)["param"] == "thinking_token_budget"


@pytest.mark.parametrize(
    "name",
    ["thinking_budget", "max_thinking_tokens", "reasoning_budget", "thinking_budget_tokens", "max_reasoning_tokens"],
)
def test_names_of_other_engines_are_refused_with_ours(thinker, name):
    for response in (
        thinker.chat(**{name: 5}),
        thinker.post("/v1/responses", {"input": "x", name: 5}),
    ):
        error = error_of(response, 400)
        assert error["param"] == name
        assert "send thinking_token_budget instead" in error["message"]
    assert thinker.chat(**{name: None}).status_code == 200


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_token_budget"])
def test_a_variable_that_the_template_does_not_know_is_refused_with_ours(thinker, name):
    error = error_of(thinker.chat(chat_template_kwargs={name: 5}), 400)
    assert error["param"] == f"chat_template_kwargs.{name}"
    assert "send thinking_token_budget instead" in error["message"]
