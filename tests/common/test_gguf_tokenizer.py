"""Tokenizers of GGUF files give the ids of the tokenizers from which they were made, and of transformers."""

import json
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from services.common.text.tokenizer import Tokenizer
from tests import real_model
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_gguf
from tests.real_model import needs_real_model

# White space before a digit: SmolLM2's own tokenizer splits digits from it first. transformers does not know its rule.
_BEFORE_DIGITS = re.compile(r"\s+(?=\d)")
PARTS = st.sampled_from(
    ["Hello", " world", "it's", "12 apples", "\n\n", "  ", "\t", "é", "今日", "🙂", "<|im_start|>", "<s>", "▁", "def f"]
)
TEXTS = st.text(max_size=40) | st.lists(PARTS, max_size=8).map("".join)


@pytest.fixture(scope="module", params=["bytes", "sentencepiece"])
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Tokenizer]:
    """The tokenizer of a file, and that of the directory from which the file was made."""
    directory = make_checkpoint(tmp_path_factory.mktemp("model"), "llama", tokenizer=request.param)
    if request.param == "sentencepiece":  # spaces as in Llama 2
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        (directory / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "LlamaTokenizer"}))
    return Tokenizer.load(str(write_gguf(directory / "model.gguf", directory))), Tokenizer.load(str(directory))


@given(text=TEXTS)
def test_ids_and_texts_are_those_of_the_directory(pair, text):
    found, expected = pair
    assert found.encode(text) == expected.encode(text)
    assert found.decode(found.encode(text)) == expected.decode(expected.encode(text))


def test_templates_and_special_tokens_are_those_of_the_directory(pair):
    found, expected = pair
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert found.render_chat(messages) == expected.render_chat(messages)
    assert found.encode_chat(messages) == expected.encode_chat(messages)
    assert found.vocabulary.token_bytes == expected.vocabulary.token_bytes
    assert found.vocabulary.special_ids >= expected.vocabulary.special_ids


@pytest.mark.parametrize("words", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "smollm", "dbrx"])
@pytest.mark.parametrize("text", ["It's 12345 o'clock,  HELLO World\n\n  x=1; naïve 今日 🙂\t!", "ab  12\r\n", ""])
def test_every_rule_of_words_keeps_the_text(words, text, tmp_path):
    directory = make_checkpoint(tmp_path / "model", "llama")
    tokenizer = Tokenizer.load(str(write_gguf(tmp_path / "model.gguf", directory, pre=words)))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@pytest.mark.parametrize("words", ["llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_rules_of_words_are_those_of_transformers(words, tmp_path):
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    directory = make_checkpoint(tmp_path / "model", "llama")
    tokenizer = Tokenizer.load(str(write_gguf(tmp_path / "model.gguf", directory, pre=words)))
    rule = tokenizers.Regex(GGUF_PRE_TOKENIZER_SPLITS[words])
    expected = tokenizers.pre_tokenizers.Split(rule, behavior="isolated")
    found = tokenizer._backend.pre_tokenizer  # noqa: SLF001 (words are not seen from outside)

    @given(text=TEXTS)
    def same(text: str) -> None:
        words = [span for _, span in expected.pre_tokenize_str(text)]
        assert [span for _, span in found.pre_tokenize_str(text)] == words

    same()


@needs_real_model
@pytest.mark.slow
def test_the_real_model_has_the_ids_and_the_template_of_transformers():
    found, expected = Tokenizer.load(str(real_model.PATH)), real_model.reference_tokenizer()

    @given(text=TEXTS)
    def same(text: str) -> None:
        text = _BEFORE_DIGITS.sub("", text)
        assert found.encode(text) == expected(text).input_ids

    same()
    for messages in (
        [{"role": "user", "content": "Hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}],
        [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")],
    ):
        text = expected.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert found.render_chat(messages) == text
        assert found.encode_chat(messages) == expected(text).input_ids


@needs_real_model
def test_the_real_model_splits_each_digit():
    """The first rule of the model's own ``tokenizer.json`` makes each digit a word."""
    tokenizer = Tokenizer.load("smollm2")
    assert [tokenizer.decode([token]) for token in tokenizer.encode("a  123")] == ["a", "  ", "1", "2", "3"]
