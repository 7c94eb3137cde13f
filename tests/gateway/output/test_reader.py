"""Calls, reasoning and content in a model's text, for every division of the text into pieces."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.text.vocabulary import Vocabulary
from services.gateway.openai.output.calls import HERMES, LLAMA3, CallParser
from services.gateway.openai.output.channels import ChannelParser
from services.gateway.openai.output.deltas import Arguments, CallBegun, Content, Parts, ReasoningDelta, parts_of
from services.gateway.openai.output.formats import OutputFormats
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.output.reasoning import ReasoningParser, ReasoningTokens
from tests.properties import examples

TOOLS = {"f", "weather"}


def reader(form=HERMES, *, thinks: bool = False, opened: bool = False, parallel: bool = True) -> OutputReader:
    reasoning = ReasoningParser(opened=opened) if thinks or opened else None
    return OutputReader(reasoning, form and CallParser(form, TOOLS), parallel=parallel)


def read(pieces, **how) -> Parts:
    reading = reader(**how)
    return parts_of([delta for piece in pieces for delta in reading.push(piece)] + reading.finish())


def calls(parts: Parts) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in parts.calls]


def hermes(arguments: str, name: str = "f") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ("Hello.\n", "Hello.\n", []),
        ("", "", []),
        (" \n", " \n", []),
        (hermes("{}"), "", [("f", "{}")]),
        (f"Let me see.\n{hermes('{}')}\n", "Let me see.", [("f", "{}")]),
        (f"{hermes('{}')}\n{hermes('[1]', 'g')}", hermes("[1]", "g"), [("f", "{}")]),
        (f"{hermes('{}')}\n{hermes('{1: 2}', 'g')}", "", [("f", "{}"), ("g", "{1: 2}")]),
        (f"{hermes('{}')} Done. ", "Done. ", [("f", "{}")]),
        (hermes('{"a": "</tool_call>", "b": ["}", {}]}'), "", [("f", '{"a": "</tool_call>", "b": ["}", {}]}')]),
        (hermes('{"a": "\\"}"}'), "", [("f", '{"a": "\\"}"}')]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
        ('<tool_call>{"id": 3, "name": "f", "parameters": {}}</tool_call>', "", [("f", "{}")]),
        # The end mark or the last bracket is missing, or there is one too many.
        ('<tool_call>{"name": "f", "arguments": {}}', "", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}</tool_call> Yes.', "Yes.", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call> Yes.', "}Yes.", [("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool', "", [("f", "{}")]),
        # No call after all.
        ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
        ("a <tool_call", "a <tool_call", []),
        ("a <tool_call> ", "a <tool_call> ", []),
        ('a <tool_call>{"name": "f", "argu', 'a <tool_call>{"name": "f", "argu', []),
        ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
        ('<tool_call>{"names": "f"}', '<tool_call>{"names": "f"}', []),
        ("a < b <tool> c", "a < b <tool> c", []),
        # It was told that there is a call: what is wrong stays in its arguments.
        (hermes('{"a": <b>}') + " Yes.", "Yes.", [("f", '{"a": <b>}}')]),
        (hermes('{"a": [1}') + hermes("{}"), "", [("f", '{"a": [1}}'), ("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": {"a": "cut', "", [("f", '{"a": "cut')]),
    ],
)  # fmt: skip
def test_hermes_calls(text, content, found):
    parts = read([text])
    assert (parts.content, calls(parts)) == (content, found)
    assert read(text) == parts


@pytest.mark.parametrize(
    ("text", "content", "found"),
    [
        ("Hello.", "Hello.", []),
        ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
        ('{"name": "f", "parameters": {}}; {"name": "weather"}', "", [("f", "{}"), ("weather", "{}")]),
        ('{"name": "f", "parameters": {}}\n{"name": "f"};\n', "", [("f", "{}"), ("f", "{}")]),
        ('I look. {"name": "f", "parameters": {}} So.', "I look.So.", [("f", "{}")]),
        ('{"name": "Tom", "parameters": {}}', '{"name": "Tom", "parameters": {}}', []),
        ('{ {"name": "f"}', "{ ", [("f", "{}")]),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("int main() { return {0}; }", "int main() { return {0}; }", []),
        ('{"name": "f", "parameters": {"a": <}} and on', "", [("f", '{"a": <}} and on')]),
        ('{"name": "f"', '{"name": "f"', []),
    ],
)  # fmt: skip
def test_llama_calls(text, content, found):
    parts = read([text], form=LLAMA3)
    assert (parts.content, calls(parts)) == (content, found)
    assert read(text, form=LLAMA3) == parts


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("<think>\nI see.\n</think>\n\nYes.", False, "I see.", "Yes."),
        ("\n<think>a</think>b", False, "a", "b"),
        ("I see.\n</think>\n\nYes.", True, "I see.", "Yes."),
        ("<think>I see.</think>Yes.", True, "I see.", "Yes."),
        ("Yes <think>or</think> no.", False, "", "Yes <think>or</think> no."),
        ("Yes.", False, "", "Yes."),
        (" Yes. ", False, "", " Yes. "),
        ("<thin", False, "", "<thin"),
        ("<think>I was cut </thi", False, "I was cut </thi", ""),
        ("I was cut", True, "I was cut", ""),
        ("<think>\n\n</think>\n\nYes.", False, "", "Yes."),
        ("<think>a</think>\n", False, "a", ""),
        ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ],
)
def test_reasoning(text, opened, thoughts, content):
    parts = read([text], form=None, thinks=True, opened=opened)
    assert (parts.reasoning, parts.content) == (thoughts, content)
    assert read(text, form=None, thinks=True, opened=opened) == parts


ANALYSIS, FINAL_MARK = "<|channel|>analysis<|message|>", "<|start|>assistant<|channel|>final<|message|>"


def in_channels(pieces) -> Parts:
    reading = OutputReader(ChannelParser())
    return parts_of([delta for piece in pieces for delta in reading.push(piece)] + reading.finish())


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        (f"{ANALYSIS}I see.<|end|>{FINAL_MARK}Yes. ", "I see.", "Yes. "),
        (f"{ANALYSIS}a<|end|><|start|>assistant{ANALYSIS}b<|end|>{FINAL_MARK}c", "ab", "c"),
        ("<|channel|>final<|message|>Yes.<|end|>", "", "Yes."),
        ("<|channel|>commentary<|message|>I look.<|end|>" + FINAL_MARK + "Yes.", "", "I look.Yes."),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}", "", "{}"),
        (f"{ANALYSIS}I was cut <|en", "I was cut <|en", ""),
        (f"{ANALYSIS}a<|end|><|start|>assis", "a", ""),
        (f"{ANALYSIS}a{FINAL_MARK}b", "a", "b"),
        ("<|channel|>ana", "", ""),
        ("<|chan", "", "<|chan"),
        ('{"a": "<|end|>"}', "", '{"a": "<|end|>"}'),
        ("Yes.", "", "Yes."),
        ("", "", ""),
    ],
)
def test_channels(text, thoughts, content):
    parts = in_channels([text])
    assert (parts.reasoning, parts.content) == (thoughts, content)
    assert in_channels(text) == parts


def test_tokens_of_channels_are_those_up_to_the_final_one():
    names = [b"<|channel|>", b"analysis", b"final", b"<|message|>", b"a", b"<|end|>", b"<|start|>", b"assistant"]
    vocabulary = Vocabulary(names, frozenset())
    reading = OutputFormats(channels=True).reader(vocabulary, tools=(), parallel=True, thinking_opened=False)
    reading.count([0, 1, 3, 4, 4, 5, 6, 7, 0, 2, 3, 4, 4, 4])
    reading.push(ANALYSIS)
    assert reading.reasoning_tokens == 11


def test_a_call_in_the_thoughts_is_none():
    parts = read([f"<think>{hermes('{}')}</think>\n{hermes('{}', 'weather')}"], thinks=True)
    assert (parts.reasoning, parts.content, calls(parts)) == (hermes("{}"), "", [("weather", "{}")])


def test_a_name_comes_once_and_arguments_as_they_are_written():
    reading = reader()
    told = [
        reading.push(piece) for piece in ("I <tool", '_call>{"name": "f", "argu', 'ments": {"a"', ': "b', '"}}', "")
    ]
    assert told == [
        [Content("I")],
        [],
        [CallBegun("f"), Arguments('{"a"')],
        [Arguments(': "b')],
        [Arguments('"}')],
        [],
    ]


def test_words_and_thoughts_come_as_they_are_written():
    reading = reader(thinks=True)
    pieces = ("<th", "ink>I", " see", "</thi", "nk> Y", "es")
    assert [reading.push(piece) for piece in pieces] == [
        [], [ReasoningDelta("I")], [ReasoningDelta(" see")], [], [Content("Y")], [Content("es")],
    ]  # fmt: skip


def test_one_call_only_when_parallel_ones_are_not_wanted():
    parts = read([f"{hermes('{}')}\n{hermes('{}', 'weather')} Done."], parallel=False)
    assert (parts.content, calls(parts)) == ("Done.", [("f", "{}")])


@pytest.mark.parametrize(
    ("text", "form", "within"),
    [
        (hermes('{"a": 1}'), HERMES, False),
        ("Hello.", HERMES, False),
        ('<tool_call>{"name": "f", "arguments": {"a": {}', HERMES, True),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', HERMES, False),
        ('<tool_call>{"name": "f", "argu', HERMES, False),
        (hermes("{}") + '<tool_call>{"name": "f", "arguments": {', HERMES, True),
        (hermes('{"a": <b>}'), HERMES, False),  # no JSON, but at its end
        (hermes('{"a": <b>}').removesuffix("</tool_call>"), HERMES, True),
        ('{"name": "f", "parameters": {"a": 1}}', LLAMA3, False),
        ('{"name": "f", "parameters": {"a"', LLAMA3, True),
        ('{"name": "f", "parameters": {"a": <b>}}', LLAMA3, True),
    ],
)
def test_whether_an_answer_ends_within_arguments(text, form, within):
    for pieces in ([text], text):
        reading = reader(form)
        for piece in pieces:
            reading.push(piece)
        reading.finish()
        assert reading.in_call == within


def test_a_call_that_is_left_out_cuts_no_other():
    reading = reader(parallel=False)
    reading.push(hermes("{}") + '<tool_call>{"name": "f", "arguments": {')
    assert not reading.in_call


def test_a_long_answer_that_never_becomes_a_call_takes_no_longer_than_its_length():
    for text in ('{"arguments": ' * 5000, "{" * 50_000, "<tool_call>{" * 5000, "\n" * 50_000, "<" * 50_000):
        for form in (HERMES, LLAMA3):
            assert read([text], form=form).content == text


SNIPPETS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "<tool", "_call>", "</", " ", "\n",
    "{", "}", "[", "]", '"', "\\", ",", ":", ";", '"name"', '"f"', '"arguments"', '"parameters"', "{}", "1", "é",
    '{"name": "f", "arguments": {"a": [1, "}"]}}', '{"name": "weather", "parameters": {', '{"name": "f"}',
)  # fmt: skip
texts = st.lists(st.sampled_from(SNIPPETS), max_size=14).map("".join) | st.lists(
    st.sampled_from((hermes('{"a": 1}'), '{"name": "f", "parameters": {}}', "<think>a</think>", " b ", ";", "\n")),
    max_size=6,
).map("".join)


@settings(max_examples=examples(1000), deadline=None, derandomize=True)
@given(
    text=texts,
    cuts=st.lists(st.integers(0, 200), max_size=12),
    form=st.sampled_from((HERMES, LLAMA3, None)),
    thinks=st.booleans(),
    opened=st.booleans(),
    parallel=st.booleans(),
)
def test_any_cut_of_an_answer_gives_the_same_parts(text, cuts, form, thinks, opened, parallel):
    how = {"form": form, "thinks": thinks, "opened": opened, "parallel": parallel}
    whole = read([text], **how)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert read([text[a:b] for a, b in itertools.pairwise(places)], **how) == whole
    assert read(text, **how) == whole


@settings(max_examples=examples(1000), deadline=None, derandomize=True)
@given(text=texts, form=st.sampled_from((HERMES, LLAMA3)))
def test_nothing_of_an_answer_without_calls_is_lost(text, form):
    parts = read([text], form=form)
    if not parts.calls:
        assert parts.content == text


def test_reasoning_tokens_are_those_up_to_its_end():
    vocabulary = Vocabulary([b"", b"<think>", b"</think>", b"a", b"</th", b"ink> b", b"<"], frozenset({0}))
    for ids, expected in (([1, 3, 3, 2, 3], 4), ([1, 3, 6, 4, 5, 3], 5), ([1, 3, 99], 3), ([1, 0, 2], 3)):
        tokens = ReasoningTokens(vocabulary)
        for token in ids:
            tokens.push([token])
        assert tokens.count == expected
    reading = OutputFormats(reasoning=True).reader(vocabulary, tools=(), parallel=True, thinking_opened=False)
    reading.count([3, 3])
    reading.push("aa")
    assert reading.reasoning_tokens == 0
