"""Clients' texts: what is too long is not tokenised, and little of what is large is tokenised at once."""

import asyncio
import threading

import pytest

from services.common.errors import InvalidRequest
from services.common.text import encoder as module
from services.common.text.encoder import TextEncoder
from services.common.text.tokenizer import Tokenizer


@pytest.fixture
def encoder(monkeypatch):
    """A ``TextEncoder`` whose limits are 1000 bytes or tokens."""
    monkeypatch.setattr(module, "MAX_TEXT_BYTES", 1000)
    monkeypatch.setattr(module, "MAX_TOKENS", 1000)
    monkeypatch.setattr(module, "AT_ONCE_BYTES", 1000)
    made = TextEncoder(Tokenizer.load("builtin"))
    yield made
    made.stop()


class Gate:
    """Texts that begin with x stay in their thread until it opens."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.entered: list[str] = []
        self.opened = threading.Event()
        self._encode = encoder.tokenizer.encode_batch
        encoder.tokenizer.encode_batch = self._wait

    def _wait(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        self.entered += [text for text in texts if text.startswith("x")]
        if texts[0].startswith("x"):
            assert self.opened.wait(60)
        return self._encode(texts, add_special_tokens)


def encoding(encoder: TextEncoder, text: str) -> asyncio.Task:
    return asyncio.create_task(encoder.encode([text], max_tokens=None, field="text"))


async def settle(encoder: TextEncoder) -> None:
    """Whoever may begin by now has begun: threads take what comes in order."""
    for _ in range(4):
        await encoder.in_thread(int)


async def begun(gate: Gate, count: int) -> None:
    async with asyncio.timeout(60):
        while len(gate.entered) < count:  # noqa: ASYNC110 (threads tell nobody)
            await asyncio.sleep(0.01)


async def test_where_a_text_may_be_longer_than_the_context_it_is_bounded_all_the_same(encoder):
    assert await encoder.encode(["x" * 1000], max_tokens=None, field="text")
    with pytest.raises(InvalidRequest, match=r"1001 bytes.* at most 1000 ") as caught:
        await encoder.encode(["x" * 1001], max_tokens=None, field="prompt")
    assert caught.value.field == "prompt"
    with pytest.raises(InvalidRequest, match=r"1001 bytes.* at most 1000 "):
        await encoder.encode_chat(lambda: "x" * 1001, max_tokens=None, field="messages")


async def test_a_text_is_bounded_by_its_bytes_and_not_by_its_characters(encoder):
    assert await encoder.encode(["é" * 500], max_tokens=None, field="text")
    for text in ("é" * 501, "🙂" * 251, "\ud800" * 400):
        with pytest.raises(InvalidRequest, match=r"at least 1\d\d\d bytes of UTF-8"):
            await encoder.encode([text], max_tokens=None, field="prompt")


async def test_room_is_counted_in_bytes_and_not_in_characters(encoder):
    gate = Gate(encoder)
    first = encoding(encoder, "x" * 900)
    await begun(gate, 1)
    other = encoding(encoder, "é" * 70)
    await settle(encoder)
    assert not other.done()
    gate.opened.set()
    await asyncio.gather(first, other)


async def test_no_more_text_is_made_of_tokens_than_would_be_taken(encoder):
    vocabulary = encoder.tokenizer.vocabulary
    longest = max(range(vocabulary.size), key=lambda token: len(vocabulary.token_bytes[token]))
    length = len(vocabulary.token_bytes[longest])
    most = [longest] * (4000 // length)
    assert len(await encoder.decode(most, skip_special_tokens=False, field="tokens")) == len(most) * length
    with pytest.raises(InvalidRequest, match=r"at most 4000 ") as caught:
        await encoder.decode([*most, longest], skip_special_tokens=False, field="tokens")
    assert caught.value.field == "tokens"


async def test_tokens_that_only_the_model_has_stand_for_nothing(encoder):
    beyond = len(encoder.tokenizer.vocabulary.with_specials.token_bytes)
    assert await encoder.decode([beyond], skip_special_tokens=False, field="tokens") == ""


async def test_a_long_list_lets_others_between(encoder):
    gate = Gate(encoder)
    many = asyncio.ensure_future(encoder.encode(["x" * 900] * 3, max_tokens=None, field="prompt"))
    await begun(gate, 1)
    other = encoding(encoder, "x" * 901)
    await settle(encoder)
    gate.opened.set()
    found, _ = await asyncio.gather(many, other)
    assert [len(text) for text in gate.entered] == [900, 901, 900, 900]
    assert len(found) == 3


async def test_a_text_that_becomes_hopeless_behind_its_beginning_is_not_tokenised_as_a_whole(encoder, monkeypatch):
    longest = max(encoder.tokenizer.vocabulary.token_bytes, key=len).decode()
    assert len(longest) > 9
    text = longest * 1000 + "7 " * 10_000
    tokens, seen = 1000, []
    assert len(encoder.tokenizer.encode(text[: 8 * tokens])) < tokens
    encode = encoder.tokenizer.encode
    monkeypatch.setattr(encoder.tokenizer, "encode", lambda part: seen.append(len(part)) or encode(part))
    monkeypatch.setattr(encoder.tokenizer, "encode_batch", lambda *_: pytest.fail("all of it was encoded"))
    with pytest.raises(InvalidRequest) as caught:
        await encoder.encode([text], max_tokens=tokens, field="text")
    assert (caught.value.reason, caught.value.field) == ("CONTEXT_LENGTH_EXCEEDED", "text")
    assert len(seen) > 1
    assert sum(seen) < len(text)


async def test_large_texts_wait_for_each_other_and_small_ones_do_not(encoder):
    gate = Gate(encoder)
    first = encoding(encoder, "x" * 900)
    await begun(gate, 1)
    await encoding(encoder, "small")
    others = [encoding(encoder, "x" * 900) for _ in range(2)]
    await asyncio.sleep(0)
    last = encoding(encoder, "small")  # comes behind them, or large ones would wait for ever
    await settle(encoder)
    assert (len(gate.entered), last.done()) == (1, False)
    gate.opened.set()
    assert len(await asyncio.gather(first, *others, last)) == 4


async def test_who_leaves_keeps_its_room_while_its_text_is_tokenised_and_gives_up_its_place_in_the_line(encoder):
    gate = Gate(encoder)
    first = encoding(encoder, "x" * 900)
    await begun(gate, 1)
    first.cancel()
    waiting, last = encoding(encoder, "x" * 900), encoding(encoder, "x" * 50)
    await settle(encoder)
    assert len(gate.entered) == 1
    waiting.cancel()
    await begun(gate, 2)  # the last one: there is room for it
    assert len(gate.entered[1]) == 50
    gate.opened.set()
    assert len(await last) == 1
    await encoding(encoder, "x" * 1000)
