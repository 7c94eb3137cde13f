"""Whose the log-probabilities are, however an answer is cut into tokens and pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.openai.output.calls import HERMES, CallParser
from services.gateway.openai.output.deltas import Content
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.output.reasoning import ReasoningParser
from services.gateway.openai.responses.attribution import Attribution
from services.gateway.openai.transcript import TokenEntry
from tests.properties import examples

CALL = '<tool_call>{"name": "weather", "arguments": {"a": 1}}</tool_call>'
ANSWERS = [
    ("So it is.", "So it is."),
    ("<think>So it is?</think>\n\nSo it is.", "So it is."),
    ("<think>S</think>S", "S"),
    (f"So it is. {CALL}", "So it is."),
    (f"<think>No</think>Not {CALL} yet {CALL}", "Notyet"),
    ("1 < 2 <tool", "1 < 2 <tool"),
    ("<tool_call>no", "<tool_call>no"),
    ("ein <think> ü🙂", "ein <think> ü🙂"),
]


def read(tokens: list[str], cuts: list[int]) -> tuple[str, list[str]]:
    """Content, and the tokens it is said to come from; a piece ends behind each of ``cuts`` tokens."""
    attribution = Attribution(OutputReader(ReasoningParser(opened=False), CallParser(HERMES, ["weather"])))
    content, taken, begin, offset = "", [], 0, 0
    for end in sorted({*(cut for cut in cuts if cut < len(tokens)), len(tokens)}):
        entries = []
        for token in tokens[begin:end]:
            entries.append(TokenEntry(0, None, offset))
            offset += len(token)
        told = [{"token": token} for token in tokens[begin:end]]
        for deltas, logprobs in attribution.read("".join(tokens[begin:end]), entries, told, last=end == len(tokens)):
            content += "".join(delta.text for delta in deltas if isinstance(delta, Content))
            taken += [logprob["token"] for logprob in logprobs]
        begin = end
    return content, taken


@pytest.mark.parametrize(("answer", "content"), ANSWERS)
def test_words_come_from_their_characters(answer, content):
    said, taken = read(list(answer), [])
    assert "".join(said.split()) == "".join(taken).replace(" ", "") == content.replace(" ", "")


@settings(max_examples=examples(200), deadline=None, derandomize=True)
@given(answer=st.sampled_from(ANSWERS), data=st.data())
def test_pieces_do_not_matter(answer, data):
    places = sorted(data.draw(st.sets(st.integers(1, len(answer[0]) - 1))))
    tokens = [answer[0][begin:end] for begin, end in zip([0, *places], [*places, None], strict=True)]
    expected = read(tokens, [])
    assert read(tokens, data.draw(st.lists(st.integers(1, len(tokens)), max_size=12))) == expected
    characters = iter("".join(expected[1]))
    assert all(character in characters for character in "".join(expected[0].split()))


def test_text_without_tokens_of_its_own_goes_on_with_the_one_before():
    attribution = Attribution(OutputReader(None, CallParser(HERMES, ["weather"])))
    parts = [*attribution.read("a ", [TokenEntry(0, None, 0)], [{"token": "a b"}], last=False)]
    parts += attribution.read("b", [], [], last=True)
    assert "".join(delta.text for deltas, _ in parts for delta in deltas) == "a b"
    assert [logprob["token"] for _, logprobs in parts for logprob in logprobs] == ["a b"]
