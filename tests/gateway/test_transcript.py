"""Text and logprobs of one choice, however its tokens come in."""

import numpy as np
import pytest

from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.codec import SampleEnding, TokenLogprob
from services.gateway.openai.transcript import Transcript, whole_text

PIECES = [b"", b"ab", b"cd", b"STO", b"P!", "é".encode()[:1], "é".encode()[1:]]
VOCABULARY = Vocabulary(PIECES, frozenset({0}))


def ending(trailing_bytes: int = 0) -> SampleEnding:
    return SampleEnding("stop", False, trailing_bytes, 1, 1, 0, 0.0, 0.0, 0.0, None)


def run(batches: list[list[int]], stops=(), trailing_bytes: int = 0):
    """The text, the token ids told after each step, and the offsets."""
    transcript = Transcript(VOCABULARY, stops)
    pieces = [transcript.push(batch, [TokenLogprob(-1.0, [], [])] * len(batch)) for batch in batches]
    pieces.append(transcript.finish(ending(trailing_bytes)))
    released = [[entry.token_id for entry in piece.entries] for piece in pieces]
    text = "".join(piece.text for piece in pieces)
    return text, released, [e.text_offset for piece in pieces for e in piece.entries]


def flat(steps: list[list[int]]) -> list[int]:
    return [token for step in steps for token in step]


def test_logprobs_come_with_their_text():
    assert run([[1], [2]]) == ("abcd", [[1], [2], []], [0, 2])


@pytest.mark.parametrize("batches", [[[1], [3], [4]], [[1, 3, 4]], [[1, 3], [4]]])
def test_tokens_of_a_stop_string_are_never_told(batches):
    text, released, offsets = run(batches, stops=["STOP"], trailing_bytes=5)
    assert (text, flat(released), offsets) == ("ab", [1], [0])


def test_a_token_half_in_the_text_is_told():
    text, released, _ = run([[1], [3], [4]], stops=["OP"], trailing_bytes=3)
    assert (text, flat(released)) == ("abST", [1, 3])


def test_held_logprobs_come_when_it_was_no_stop_string():
    assert run([[1], [3], [2]], stops=["STOP"]) == ("abSTOcd", [[1], [], [3, 2], []], [0, 2, 5])


def test_a_character_over_two_tokens():
    assert run([[5], [6], [1]]) == ("éab", [[], [5, 6], [1], []], [0, 0, 1])


def test_half_a_character_counts_as_the_one_that_stands_for_it():
    assert run([[5], [1], [2]]) == ("\ufffdabcd", [[], [5, 1], [2], []], [0, 1, 3])


def test_special_tokens_have_logprobs_and_no_text():
    text, released, _ = run([[1], [0], [2]])
    assert (text, flat(released)) == ("abcd", [1, 0, 2])


@pytest.mark.parametrize("stops", [(), ("STOP",)])
@pytest.mark.parametrize("tokens", [[1, 3, 4], [1, 5, 6, 2, 5], [3, 99, 4], []])
def test_a_complete_answer_reads_as_its_pieces_do(tokens, stops):
    trailing = 1 + len("STOP") if stops and tokens[-1:] == [4] else 0
    text, _, _ = run([tokens], stops, trailing)
    assert whole_text(VOCABULARY, np.array(tokens, np.uint32), ending(trailing)) == text
    assert whole_text(VOCABULARY, tokens, ending(trailing)) == text
