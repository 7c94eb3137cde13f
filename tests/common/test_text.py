"""Tokenising and detokenising, held against transformers on the same files."""

import json
import random
import subprocess
import sys

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from services.common.errors import InvalidRequest
from services.common.model.files import BUILTIN
from services.common.text.detokenizer import Detokenizer
from services.common.text.tokenizer import Tokenizer
from services.common.text.tokenizer_class import apply_tokenizer_class
from services.common.text.tokenizer_files import read_backend
from services.common.text.vocabulary import Vocabulary
from tests.checkpoints import make_checkpoint, write_tokenizer
from tests.properties import examples
from tests.quick import quick_if

TEXTS = [
    "Hello, world!",
    "  two spaces, then\n\nnew lines\tand a tab ",
    "Zahlen 1234567890 und Umlaute äöü ß",
    "emoji 🙂👩‍👩‍👧 and 日本語 text",
    "",
    "a",
    "\x00 control \x7f",
]


# How tokenizers of other families split texts: o200k of gpt-oss, and digits one by one as Granite and SmolLM have them.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS = {
    "o200k": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(O200K), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.fixture(scope="module", params=["bytes", "sentencepiece", "builtin", "gemma", *SPLITS])
def directory(request, tmp_path_factory):
    if request.param == "builtin":
        return BUILTIN
    target = tmp_path_factory.mktemp("model")
    if request.param in ("bytes", "sentencepiece"):
        return make_checkpoint(target, "llama", tokenizer=request.param)
    write_tokenizer(target, "sentencepiece" if request.param == "gemma" else "bytes")
    (target / "config.json").write_text(json.dumps({"model_type": "gemma2" if request.param == "gemma" else "granite"}))
    path = str(target / "tokenizer.json")
    changed = tokenizers.Tokenizer.from_file(path)
    if request.param == "gemma":  # a text has no space before it, and spaces between words end a piece
        changed.normalizer = normalizers.Replace(" ", "▁")
        changed.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        changed.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        changed.pre_tokenizer = SPLITS[request.param]
    changed.save(path)
    return target


@pytest.fixture(scope="module")
def ours(directory):
    return Tokenizer.load(str(directory))


@pytest.fixture(scope="module")
def theirs(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_transformers(ours, theirs, text):
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.text(), st.sampled_from([*TEXTS, "<s>", "</s>", "<|endoftext|>", "a" * 300]))), st.booleans()
)
def test_encoding_without_offsets_equals_encoding_with_them(ours, directory, parts, add_special_tokens):
    backend, text = read_backend(directory), "".join(parts)
    apply_tokenizer_class(backend, directory)
    ids = backend.encode(text, add_special_tokens=add_special_tokens).ids
    assert ours.encode(text, add_special_tokens) == ids
    assert ours.encode_batch([text], add_special_tokens) == [ids]


def test_a_batch_equals_its_texts(ours):
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_chat_equals_transformers(ours, theirs, add_generation_prompt):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is <1 & 2>?"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": "Sure? 🙂"},
    ]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)
    assert ours.encode_chat(messages, add_generation_prompt) == expected


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_token_by_token(ours, text):
    detokenizer = Detokenizer(ours.vocabulary)
    pieces = [detokenizer.push([token]) for token in ours.encode(text)] + [detokenizer.finish()]
    # SentencePiece puts a space before a text; behind a prompt it belongs to the answer.
    assert "".join(pieces) in (text, f" {text}")


def test_generated_text_is_what_transformers_adds_to_the_prompt(ours, theirs):
    generator = random.Random(7)
    prompt = ours.encode("Hello, world!")
    before = theirs.decode(prompt, skip_special_tokens=True)
    # transformers shows a broken run of SentencePiece byte tokens as one U+FFFD for each byte, its whole characters
    # included; a stream cannot know that a run will break, so runs of bytes are left to whole texts here.
    single_bytes = {token for token in range(ours.vocabulary.size) if theirs.convert_ids_to_tokens(token)[:3] == "<0x"}
    tokens = sorted(set(range(ours.vocabulary.size)) - single_bytes)
    for _ in range(50):
        generated = [*generator.choices(tokens, k=20), *ours.encode(generator.choice(TEXTS))]
        detokenizer = Detokenizer(ours.vocabulary)
        text = "".join(detokenizer.push([token]) for token in generated) + detokenizer.finish()
        assert before + text == theirs.decode(prompt + generated, skip_special_tokens=True)


def test_special_tokens_have_no_text(ours):
    assert ours.vocabulary.special_ids
    assert ours.vocabulary.text_bytes(sorted(ours.vocabulary.special_ids)) == b""


def test_ids_beyond_the_tokenizer_have_no_text(ours):
    assert ours.vocabulary.text_bytes([ours.vocabulary.size + 5]) == b""


def byte_vocabulary(*longer: bytes) -> Vocabulary:
    return Vocabulary([bytes([byte]) for byte in range(256)] + list(longer), frozenset())


@settings(max_examples=examples(300))
@given(st.text(), st.lists(st.text(min_size=1, max_size=6), max_size=3), st.randoms())
def test_text_that_is_given_out_is_never_taken_back(text, stops, randomness):
    """However the bytes are cut into tokens: whole characters only, nothing of a stop string, nothing lost."""
    data = text.encode()
    cuts = sorted(randomness.sample(range(len(data) + 1), min(3, len(data) + 1)))
    tokens = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    vocabulary = Vocabulary(tokens, frozenset())
    detokenizer = Detokenizer(vocabulary, stops)
    shown, so_far = "", b""
    for token, piece in enumerate(tokens):
        shown, so_far = shown + detokenizer.push([token]), so_far + piece
        matches = [(so_far.find(stop) + len(stop), stop) for stop in map(str.encode, stops) if stop in so_far]
        if matches:  # here the scheduler ends the sample
            end, stop = min(matches)
            assert stop.decode() not in shown
            trailing = len(so_far) - end + len(stop)
            assert shown + detokenizer.finish(trailing) == so_far[: len(so_far) - trailing].decode()
            return
        assert text.startswith(shown)
        rest = so_far[len(shown.encode()) :]
        may_start_a_stop = any(stop.encode().startswith(rest[index:]) for index in range(len(rest)) for stop in stops)
        half_a_character = not rest.decode(errors="ignore")
        assert not rest or may_start_a_stop or half_a_character, "held back without need"
    assert shown + detokenizer.finish() == text


def test_a_match_that_ended_nothing_is_given_out_with_the_next_tokens():
    detokenizer = Detokenizer(byte_vocabulary(b"a stop b"), ["stop"])
    assert [detokenizer.push([256]), detokenizer.push(b"c"), detokenizer.finish()] == ["a ", "stop bc", ""]


def test_half_a_character_waits_for_the_other_half():
    first, second = "🙂".encode()[:2], "🙂".encode()[2:]
    detokenizer = Detokenizer(byte_vocabulary(first, second))
    assert [detokenizer.push([256]), detokenizer.push([257])] == ["", "🙂"]


def test_a_character_that_never_ends_is_replaced_at_the_end():
    detokenizer = Detokenizer(byte_vocabulary())
    assert detokenizer.push([0x61, 0xF0]) + detokenizer.finish() == "a\ufffd"


def test_a_model_without_a_template_refuses_chats(tmp_path):
    directory = make_checkpoint(tmp_path, "llama")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = Tokenizer.load(str(directory))
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_the_messages_says_why(tmp_path):
    directory = make_checkpoint(tmp_path, "llama")
    (directory / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        Tokenizer.load(str(directory)).encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_a_template_cannot_reach_the_interpreter(tmp_path):
    directory = make_checkpoint(tmp_path, "llama")
    (directory / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        Tokenizer.load(str(directory)).encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("add_bos", [True, False])
def test_only_the_tokenizer_file_decides_about_bos(tmp_path, add_bos):
    directory = make_checkpoint(tmp_path, "llama", tokenizer="sentencepiece")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": add_bos}))
    ours, theirs = Tokenizer.load(str(directory)), AutoTokenizer.from_pretrained(directory)
    assert ours.encode("Hello") == theirs.encode("Hello")
    assert ours.encode("Hello")[0] == theirs.bos_token_id


@pytest.mark.parametrize("tokenizer", ["bytes", "sentencepiece"])
@pytest.mark.parametrize(
    "model_type",
    quick_if(
        {"gemma2", "gpt_oss", "llama", "mistral", "phi3", "qwen3"}.__contains__,
        [
            *("gemma2", "gemma3", "gemma3_text", "glm4_moe", "gpt_oss", "granite", "llama", "mistral", "mixtral"),
            *("olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3"),
        ],
    ),
)
@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "PreTrainedTokenizerFast"},
        {"tokenizer_class": "LlamaTokenizerFast"},
        {"tokenizer_class": "LlamaTokenizer", "legacy": True},
        {"tokenizer_class": "LlamaTokenizer", "add_prefix_space": False},
        {"tokenizer_class": "Qwen2Tokenizer"},
        {"tokenizer_class": "GemmaTokenizer"},
        {"tokenizer_class": None},
    ],
    ids=str,
)
def test_the_tokenizer_class_counts_as_in_transformers(tmp_path, model_type, tokenizer, settings):
    write_tokenizer(tmp_path, tokenizer)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | settings
    config = {name: value for name, value in config.items() if value is not None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    if tokenizer == "sentencepiece" and type(theirs).__name__ == "Qwen2Tokenizer":
        pytest.skip("transformers reads a SentencePiece vocabulary as byte-level here: no text survives that")
    if tokenizer == "bytes" and type(theirs).__name__ in ("LlamaTokenizer", "GemmaTokenizer"):
        pytest.skip("transformers reads a byte-level vocabulary as SentencePiece here: no text survives that")
    ours = Tokenizer.load(str(tmp_path))
    for text in [*TEXTS, " leading space", "<|user|> behind a special token<|end|>12 34", "cafe\u0301"]:
        assert ours.encode(text) == theirs.encode(text)
        decoded = theirs.decode(theirs.encode(text), skip_special_tokens=True)
        assert ours.vocabulary.text_bytes(ours.encode(text)).decode().lstrip() == decoded.lstrip()


def test_a_sentencepiece_model_alone_is_enough(tmp_path):
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(["the quick brown fox jumps over the lazy dog", *TEXTS[:4]] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 330}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    ours, theirs = Tokenizer.load(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True)


def test_code_beside_a_sentencepiece_model_is_not_run_whatever_is_on_standard_input(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unheard-of", "vocab_size": 330}))
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: ...\n")
    program = f"from services.common.text.tokenizer import Tokenizer\nTokenizer.load({str(tmp_path)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", program], input="y\n" * 9, capture_output=True, text=True, check=False
    )
    assert "converting it failed" in ended.stderr
    assert not (tmp_path / "ran").exists()


def test_a_tokenizer_that_cannot_be_converted_says_why(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(InvalidRequest, match=r"converting it failed.*save the tokenizer as tokenizer\.json"):
        Tokenizer.load(str(tmp_path))


def test_a_directory_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(InvalidRequest, match="name a directory with tokenizer="):
        Tokenizer.load(str(tmp_path))
