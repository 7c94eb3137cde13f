"""Makes the tokenizer and the chat templates of a GGUF file.

The file has the vocabulary with the kinds of its tokens, and the merges or scores. How texts are split into words is
known by a name only.
"""

import hashlib
import json
import reprlib
from collections.abc import Callable
from typing import NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from services.common.errors import InvalidRequest
from services.common.model.gguf_config import architecture_of, read_gguf_config
from services.common.model.gguf_file import GgufFile
from services.common.model.json_object import MOST_VOCABULARY
from services.common.text.chat_template import ChatTemplates, compile_templates
from services.common.text.sentencepiece_model import bpe_of_scores
from services.common.text.tiktoken_ranks import LLAMA3_WORDS, QWEN_WORDS, byte_level_words
from services.common.text.tokenizer_class import apply_gemma, apply_llama, apply_phi3
from services.common.text.tokenizer_files import add_ends, wrap_errors

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_FIELDS = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_IDS = {"unk_token": "unknown_token_id", "pad_token": "padding_token_id"}
# Values of ``token_type``, as in SentencePiece.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
_O200K_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)


class ModelText(NamedTuple):
    """The tokenizer and the chat templates of a model."""

    backend: tokenizers.Tokenizer
    vocab_size: int  # of the model; 0 = unknown
    templates: ChatTemplates | None
    fingerprint: str  # SHA-256 of the tokenizer's files or fields


class _Words(NamedTuple):
    """Rules by which a byte-level vocabulary splits texts into words."""

    splitter: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False  # a word that is a token is used without merging its parts
    begins: bool = False  # texts begin with BOS unless add_bos_token says otherwise


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _gpt2_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _rule(rule: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    return lambda: byte_level_words(rule)


_LLAMA3 = _Words(_rule(LLAMA3_WORDS), ignore_merges=True, begins=True)
_QWEN = _Words(_rule(QWEN_WORDS), normalizers.NFC)
# By the value of ``tokenizer.ggml.pre``.
_WORDS = {
    "dbrx": _Words(_rule(LLAMA3_WORDS)),
    "deepseek-r1-qwen": _QWEN,
    "falcon3": _LLAMA3,
    "gpt-2": _Words(_gpt2),
    "gpt-4o": _Words(_rule(_O200K_WORDS)),
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN,
    "refact": _Words(_gpt2_digits),
    "smaug-bpe": _Words(_rule(LLAMA3_WORDS)),
    "smollm": _Words(_gpt2_digits),
    "starcoder": _Words(_gpt2_digits),
    "tekken": _Words(_rule(_TEKKEN_WORDS), ignore_merges=True),
}


def read_gguf_text(file: GgufFile) -> ModelText:
    """Return the tokenizer and the chat templates in ``file``.

    Raises ``InvalidRequest``, which names the field, for a tokenizer that is not supported, and for a field that is
    missing or of a wrong type or size.
    """
    tokens = _Tokens(file)
    kind = file.given.text(f"{_FIELDS}model")
    with wrap_errors(file.path, "converting its tokenizer failed", "fetch the file again"):
        if kind == "gpt2":
            backend, begins = tokens.byte_level()
        elif kind == "llama":
            backend, begins = tokens.sentencepiece(), True
        else:
            raise InvalidRequest(
                f"{file.path}: {_FIELDS}model={reprlib.repr(kind)} is not supported; expected gpt2 or llama, or name a"
                " directory with tokenizer=",
                field="tokenizer",
            )
        special = tokens.special()
        ends = {"bos": begins, "eos": False}
        named = {name: special.get(f"{name}_token") for name in ends}
        add_ends(
            backend,
            {
                name: token
                for name, token in named.items()
                if token and file.given.boolean(f"{_FIELDS}add_{name}_token", ends[name])
            },
        )
    plain, with_tools = (file.given.text(each) for each in (_TEMPLATE, f"{_TEMPLATE}.tool_use"))
    templates = compile_templates(plain, with_tools, special)
    return ModelText(backend, read_gguf_config(file)["vocab_size"], templates, _fingerprint(file))


class _Tokens:
    """The vocabulary of a file."""

    def __init__(self, file: GgufFile) -> None:
        self._file, given = file, file.given
        self._contents = given.texts(f"{_FIELDS}tokens") or []
        self._kinds = given.integers(f"{_FIELDS}token_type") or [_NORMAL] * len(self._contents)
        if not self._contents or len(self._kinds) != len(self._contents):
            raise InvalidRequest(
                f"{file.path}: {_FIELDS}tokens has {len(self._contents)} entries, and {_FIELDS}token_type"
                f" {len(self._kinds)}; expected one for each token; fetch the file again",
                field="tokenizer",
            )

    def byte_level(self) -> tuple[tokenizers.Tokenizer, bool]:
        """Return a byte-level BPE, and whether texts begin with BOS by default."""
        name = self._file.given.text(f"{_FIELDS}pre")
        if name not in _WORDS:
            raise InvalidRequest(
                f"{self._file.path}: {_FIELDS}pre={reprlib.repr(name)} is not supported; expected one of"
                f" {', '.join(_WORDS)}, or name a directory with tokenizer=",
                field="tokenizer",
            )
        words = _WORDS[name]
        merges = [each.split(" ") for each in self._file.given.texts(f"{_FIELDS}merges") or []]
        if any(len(pair) != 2 for pair in merges):
            raise ValueError("an entry of its merges is not two tokens with a space between them")
        made = tokenizers.Tokenizer(
            models.BPE(
                vocab=self._ids(),
                merges=[(first, second) for first, second in merges],
                fuse_unk=False,
                ignore_merges=words.ignore_merges,
            )
        )
        if words.normalizer is not None:
            made.normalizer = words.normalizer()
        made.pre_tokenizer = words.splitter()
        made.decoder = decoders.ByteLevel()
        self._add_to(made)
        return made, words.begins

    def sentencepiece(self) -> tokenizers.Tokenizer:
        """Return a BPE of a SentencePiece vocabulary, which has scores."""
        architecture, given = architecture_of(self._file), self._file.given
        scores = self._file.fields.get(f"{_FIELDS}scores")
        count = len(self._contents)
        values = given.numbers(f"{_FIELDS}scores", count, least=-1e9, most=1e9) if scores is not None else None
        if values is None:
            raise InvalidRequest(f"{self._file.path}: {_FIELDS}scores is missing", field="tokenizer")
        gemma = architecture.startswith("gemma")
        if gemma:  # the order of its tokens is that of its merges; runs of spaces are merged as well
            values = tuple(float(-token) for token in range(count))
            self._contents = ["▁" * len(each) if each and not each.strip(" ") else each for each in self._contents]
        usable = (_NORMAL, _USER_DEFINED) if gemma else (_NORMAL,)
        pieces = {
            piece: score
            for piece, kind, score in zip(self._contents, self._kinds, values, strict=True)
            if kind in usable
        }
        unknown = next((token for token, kind in enumerate(self._kinds) if kind == _UNKNOWN), None)
        model = bpe_of_scores(
            self._ids(),
            pieces,
            None if unknown is None else self._contents[unknown],
            byte_fallback=_BYTE in self._kinds,
        )
        made = tokenizers.Tokenizer(model)
        if gemma:
            apply_gemma(made)
        elif architecture == "phi3":
            apply_phi3(made)
        else:
            apply_llama(made, prefix=given.boolean(f"{_FIELDS}add_space_prefix", True))
        self._add_to(made)
        return made

    def special(self) -> dict[str, str]:
        """Return the special tokens by the names in templates."""
        found = {}
        for name in SPECIAL_NAMES:
            key = f"{_FIELDS}{_IDS.get(name, f'{name}_id')}"
            token = self._file.given.integer_or_none(key, least=0, most=MOST_VOCABULARY - 1)
            if token is not None and token < len(self._contents):
                found[name] = self._contents[token]
        return found

    def _ids(self) -> dict[str, int]:
        return {content: token for token, content in enumerate(self._contents)}

    def _add_to(self, made: tokenizers.Tokenizer) -> None:
        """Add control tokens and user-defined tokens, which texts contain as a whole."""
        pairs = [pair for pair in zip(self._contents, self._kinds, strict=True) if pair[0]]
        special = [content for content, kind in pairs if kind in (_CONTROL, _UNKNOWN)]
        made.add_special_tokens([AddedToken(content, normalized=False, special=True) for content in special])
        symbols = [content for content, kind in pairs if kind == _USER_DEFINED and content.strip("▁")]
        made.add_tokens([AddedToken(content, normalized=False, special=False) for content in symbols])


def _fingerprint(file: GgufFile) -> str:
    """Return the SHA-256 of the fields of the tokenizer."""
    fields = {name: value for name, value in file.fields.items() if name.startswith("tokenizer.")}
    return hashlib.sha256(json.dumps([architecture_of(file), fields]).encode()).hexdigest()
