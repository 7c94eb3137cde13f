"""Tokenizers without a ``tokenizer.json`` are held against the libraries that their files belong to."""

import base64
import json
import random
import subprocess
import sys

import pytest
import sentencepiece
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from services.common.errors import InvalidRequest
from services.common.model.files import tokenizer_fingerprint
from services.common.text.tiktoken_ranks import LLAMA3_WORDS, QWEN_WORDS, special_tokens
from services.common.text.tokenizer import Tokenizer
from services.common.text.vocabulary import byte_level_text

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "How many apples are left when 12 of 30 are eaten? 30 - 12 = 18.",
    "def add(first, second):",
    "    return first + second",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich",
    "今日はいい天気ですね。 Привет, мир! 🙂",
]
TEXTS = [
    *LINES,
    "",
    "   ",
    " leading",
    "  two spaces, then\n\nnew lines\tand a tab ",
    "emoji 🙂👩‍👩‍👧 ქართული 𐍈 العربية",
    "\x00 control \x7f",
    "ﬁne ①②③ ｱｲｳ",
    "12345678 12 3",
]
ALPHABET = "abcdefgh thequickbrown  \n\t<>éüß🙂日本語ﬁ①½0123Ωжქ𐍈"


def random_texts() -> list[str]:
    chosen = random.Random(0)
    return TEXTS + ["".join(chosen.choices(ALPHABET, k=chosen.randint(1, 50))) for _ in range(300)]


def write(directory, *, model_type="unheard-of", **settings) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def train(directory, kind: str, **settings) -> sentencepiece.SentencePieceProcessor:
    """Write ``tokenizer.model``; returns what the library makes of it."""
    corpus = directory / "corpus.txt"
    corpus.write_text("\n".join(LINES * 20))
    settings = {"vocab_size": 600, "hard_vocab_limit": False, "minloglevel": 2} | settings
    prefix = directory / "tokenizer"
    sentencepiece.SentencePieceTrainer.train(input=str(corpus), model_prefix=str(prefix), model_type=kind, **settings)
    return sentencepiece.SentencePieceProcessor(f"{prefix}.model")


LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SENTENCEPIECE = {
    "as Llama": LLAMA,
    "defaults": {"vocab_size": 180},
    "bytes": {"byte_fallback": True},
    "no prefix": {"byte_fallback": True, "add_dummy_prefix": False},
    "folded": {"vocab_size": 180, "normalization_rule_name": "nfkc_cf"},
}


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("settings", SENTENCEPIECE.values(), ids=SENTENCEPIECE)
def test_a_sentencepiece_model_gives_the_tokens_of_its_library(tmp_path, kind, settings):
    theirs = train(tmp_path, kind, **settings)
    write(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    for text in random_texts():
        expected = theirs.encode(text)
        assert ours.encode(text) == expected, text
        if theirs.unk_id() not in expected:  # written otherwise
            assert ours.decode(expected) == theirs.decode(expected)
            assert ours.vocabulary.text_bytes(expected).decode().removeprefix(" ") == theirs.decode(expected)


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_symbols_of_a_sentencepiece_model_are_found_in_texts(tmp_path, kind):
    theirs = train(tmp_path, kind, byte_fallback=True, user_defined_symbols="<tool>,▁▁,[x]")
    write(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    for text in ("dog<tool>fox", "dog <tool> fox [x][x] 12", "the <tool", " dog", "a▁▁b"):
        assert ours.encode(text) == theirs.encode(text), text
    ids = theirs.encode("a▁▁b<tool>")
    assert ours.vocabulary.text_bytes(ids).decode() == " a  b<tool>"


def test_control_pieces_are_special_tokens(tmp_path):
    theirs = train(tmp_path, "bpe", control_symbols="[INST]", **LLAMA)
    write(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    special = [theirs.piece_to_id(piece) for piece in ("<s>", "[INST]", "</s>", "<unk>")]
    assert ours.vocabulary.special_ids == set(special)
    begin, instruct, end, _ = special
    assert ours.encode("<s>[INST] dog</s>") == [begin, instruct, *theirs.encode(" dog"), end]


@pytest.mark.parametrize(
    ("settings", "begin", "end"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_bos_token": True, "bos_token": {"content": "<s>"}, "add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True, "eos_token": "</s>"}, [], [2]),
    ],
)
def test_settings_beside_the_model_say_how_texts_begin_and_end(tmp_path, settings, begin, end):
    theirs = train(tmp_path, "bpe", **LLAMA)
    write(tmp_path, **settings)
    ours = Tokenizer.load(str(tmp_path))
    assert ours.encode("the dog") == [*begin, *theirs.encode("the dog"), *end]
    assert ours.encode("the dog", add_special_tokens=False) == theirs.encode("the dog")


def test_tokens_that_were_added_later_have_their_ids(tmp_path):
    theirs = train(tmp_path, "bpe", **LLAMA)
    size = theirs.get_piece_size()
    user, think = {"content": "<|user|>", "special": True}, {"content": "<think>", "special": False}
    begin = {"content": "<s>", "special": True}
    write(tmp_path, added_tokens_decoder={"1": begin, str(size + 1): user, str(size + 2): think})
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    ours = Tokenizer.load(str(tmp_path))
    assert ours.encode("<|user|><think><pad>") == [size + 1, size + 2, size]
    assert {size, size + 1} < ours.vocabulary.special_ids
    assert ours.vocabulary.text_bytes([size + 2]) == b"<think>"


def learn(directory, name: str, pattern: str, **settings) -> tiktoken.Encoding:
    """Write ranks of byte pairs as tiktoken does; returns what tiktoken makes of them."""
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(LINES * 3, trainer)
    pieces = {byte_level_text(bytes([byte])): bytes([byte]) for byte in range(256)}
    learned = sorted(learner.get_vocab(), key=lambda piece: learner.token_to_id(piece))
    tokens = [b"".join(pieces[character] for character in piece) for piece in learned]
    lines = (base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))
    (directory / name).write_bytes(b"".join(lines))
    write(directory, **settings)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding("learned", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.parametrize(
    ("name", "pattern", "model_type"),
    [
        ("tokenizer.model", LLAMA3_WORDS, "llama"),
        ("tiktoken.model", LLAMA3_WORDS, "llama"),
        ("tokenizer.model", QWEN_WORDS, "qwen3"),
        ("qwen.tiktoken", QWEN_WORDS, "qwen"),
    ],
)
def test_ranks_give_the_tokens_of_tiktoken(tmp_path, name, pattern, model_type):
    theirs = learn(tmp_path, name, pattern, model_type=model_type)
    ours = Tokenizer.load(str(tmp_path))
    for text in random_texts():
        expected = theirs.encode(text)
        assert ours.encode(text) == expected, text
        assert ours.decode(expected) == theirs.decode(expected)
        assert ours.vocabulary.text_bytes(expected) == text.encode()


def test_special_tokens_of_ranks_are_in_the_files_beside_them(tmp_path):
    theirs = learn(tmp_path, "tokenizer.model", LLAMA3_WORDS)
    size, begin = theirs.n_vocab, "<|begin|>"
    entries = {str(size): {"content": begin, "special": True}, str(size + 3): {"content": "<|eot|>", "special": True}}
    write(tmp_path, added_tokens_decoder=entries, add_bos_token=True, bos_token=begin)
    ours = Tokenizer.load(str(tmp_path))
    assert ours.encode("dog<|eot|>") == [size, *theirs.encode("dog"), size + 3]
    assert ours.vocabulary.special_ids == {size, size + 1, size + 2, size + 3}


def test_special_tokens_that_no_file_names_are_those_of_the_published_models():
    llama, qwen = special_tokens(128_000), special_tokens(151_643)
    assert (len(llama), len(qwen), special_tokens(500)) == (256, 208, [])
    assert [llama.index(name) for name in ("<|begin_of_text|>", "<|start_header_id|>", "<|eot_id|>")] == [0, 6, 9]
    assert llama[-1] == "<|reserved_special_token_247|>"
    assert len(set(llama)) == 256
    assert [qwen.index(name) for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|extra_0|>")] == [0, 1, 2, 3]


def test_texts_of_published_ranks_begin_with_bos(tmp_path, monkeypatch):
    from services.common.text import tiktoken_ranks

    theirs = learn(tmp_path, "tokenizer.model", LLAMA3_WORDS, model_type="llama")
    monkeypatch.setattr(tiktoken_ranks, "_LLAMA3_RANKS", theirs.n_vocab)
    ours = Tokenizer.load(str(tmp_path))
    assert ours.encode("dog<|eot_id|>") == [theirs.n_vocab, *theirs.encode("dog"), theirs.n_vocab + 9]


@pytest.mark.parametrize(
    ("content", "settings", "reason"),
    [
        (b"not a model", {}, "it is not a SentencePiece model"),
        (b"", {}, "it is not a SentencePiece model: it has no pieces"),
        (b"IQ== 0\nnothing\n", {}, "line 2 is not a token in base64 and its rank"),
        (b"IQ== 0\nIg== 2\n", {}, "its ranks are not the consecutive numbers from 0"),
        (b"IQ== 0\n", {"add_bos_token": True}, "its texts should have '<s>', which is not in the vocabulary"),
        (b"IQ== 0\n", {"added_tokens_decoder": {"0": {"content": "x"}}}, "token 'x' has the id 0"),
    ],
)
def test_a_file_that_cannot_be_converted_says_why(tmp_path, content, settings, reason):
    (tmp_path / "tokenizer.model").write_bytes(content)
    write(tmp_path, **settings)
    with pytest.raises(InvalidRequest, match=rf"converting it failed: {reason}.*save the tokenizer as tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("kind", ["word", "char"])
def test_other_kinds_of_sentencepiece_models_are_refused(tmp_path, kind):
    train(tmp_path, kind, vocab_size=100, use_all_vocab=kind == "char")
    with pytest.raises(InvalidRequest, match=f"SentencePiece models of kind '{kind}' are not supported"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.model", "tiktoken.model", "qwen.tiktoken", "added_tokens.json"])
def test_every_file_of_a_tokenizer_counts_for_its_fingerprint(tmp_path, name):
    empty = tokenizer_fingerprint(tmp_path)
    (tmp_path / name).write_bytes(b"{}")
    assert tokenizer_fingerprint(tmp_path) != empty


def test_neither_transformers_nor_torch_is_loaded(tmp_path):
    train(tmp_path, "bpe", **LLAMA)
    write(tmp_path, tokenizer_class="LlamaTokenizer")
    program = (
        "import sys\nfrom services.common.text.tokenizer import Tokenizer\n"
        f"Tokenizer.load({str(tmp_path)!r})\nprint([name for name in ('torch', 'transformers', 'sentencepiece')"
        " if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"
