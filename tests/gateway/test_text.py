"""Tokenising off the event loop, and refusing what is too long without doing it."""

import asyncio

import pytest

from services.common.errors import InvalidRequest
from services.gateway.engine.text import TextEngine


@pytest.fixture
def text(tokenizer):
    engine = TextEngine(tokenizer)
    yield engine
    engine.stop()


async def test_requests_that_come_together_get_their_own_ids(text, tokenizer):
    prompts = [[f"prompt {i}", f"and {i * i}"] for i in range(100)]
    encoded = await asyncio.gather(*(text.encode(pair, max_tokens=100, field="prompt") for pair in prompts))
    assert encoded == [[tokenizer.encode(part) for part in pair] for pair in prompts]


async def test_one_that_was_cancelled_does_not_disturb_the_others(text, tokenizer):
    tasks = [asyncio.create_task(text.encode([f"text {i}"], max_tokens=100, field="prompt")) for i in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert done[1:] == [[tokenizer.encode("text 1")], [tokenizer.encode("text 2")]]


async def test_a_large_prompt_is_encoded_as_any_other(text, tokenizer):
    large = "Tom has 3 apples. " * 8000
    assert await text.encode([large], max_tokens=200_000, field="prompt") == [tokenizer.encode(large)]


@pytest.mark.parametrize("prompt", ["word " * 1_000_000, "x" * 100_000])
async def test_a_hopeless_prompt_is_refused_without_encoding_all_of_it(text, monkeypatch, prompt):
    seen = []
    encode = text.tokenizer.encode
    monkeypatch.setattr(text.tokenizer, "encode", lambda part: seen.append(len(part)) or encode(part))
    monkeypatch.setattr(text.tokenizer, "encode_batch", lambda parts: pytest.fail("all of it was encoded"))
    for max_tokens in (1000, 10_000 if len(prompt) > 1_000_000 else 1000):
        with pytest.raises(InvalidRequest) as caught:
            await text.encode([prompt], max_tokens=max_tokens, field="prompt")
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert sum(seen) <= 80_000


async def test_what_a_template_leaves_out_of_a_conversation_does_not_count(text, monkeypatch):
    """Templates of reasoning models drop the thoughts of earlier turns."""
    monkeypatch.setattr(text.tokenizer, "render_chat", lambda messages, *_, **__: messages[-1]["content"])
    messages = [{"role": "assistant", "content": "thoughts " * 100_000}, {"role": "user", "content": "Hi"}]
    rendered, ids = await text.encode_chat(lambda: messages, add_generation_prompt=True, max_tokens=100)
    assert rendered == "Hi"
    assert ids == text.tokenizer.encode("Hi", add_special_tokens=False)
    with pytest.raises(InvalidRequest):
        await text.encode_chat(lambda: messages[:1], add_generation_prompt=True, max_tokens=100)


async def test_a_tokenizer_that_panics_leaves_nobody_waiting(text, monkeypatch):
    class Panic(BaseException):
        """What pyo3 raises for a panic in Rust."""

    def panic(texts):
        raise Panic

    monkeypatch.setattr(text.tokenizer, "encode_batch", panic)
    with pytest.raises(Panic):
        await asyncio.wait_for(text.encode(["x"], max_tokens=10, field="prompt"), 30)


async def test_one_that_cannot_be_encoded_leaves_those_beside_it_alone(text, tokenizer, monkeypatch):
    prompts = ["a", "bad \udce9", "b"]
    asked = [text.encode([prompt], max_tokens=100, field="prompt") for prompt in prompts]
    first, refused, last = await asyncio.gather(*asked, return_exceptions=True)
    assert [first, last] == [[tokenizer.encode("a")], [tokenizer.encode("b")]]
    assert (type(refused), refused.field) == (InvalidRequest, "prompt")
    for more in ({"add_special_tokens": False}, {}):
        with pytest.raises(InvalidRequest, match="surrogate"):
            await text.encode(["bad \udce9" * 10_000], max_tokens=None, field="prompt", **more)

    encode = tokenizer.encode_batch

    def fail_at_x(texts):
        if "x" in texts:
            raise RuntimeError("x")
        return encode(texts)

    monkeypatch.setattr(text.tokenizer, "encode_batch", fail_at_x)
    asked = [text.encode([prompt], max_tokens=100, field="prompt") for prompt in ("a", "x", "b")]
    first, failed, last = await asyncio.gather(*asked, return_exceptions=True)
    assert [first, last] == [[tokenizer.encode("a")], [tokenizer.encode("b")]]
    assert type(failed) is RuntimeError


def test_a_token_by_itself_is_text_and_bytes(text, tokenizer):
    [token] = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    assert text.token_text(token) == ("<|endoftext|>", b"<|endoftext|>")
