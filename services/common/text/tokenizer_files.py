"""Reads a model's tokenizer: ``tokenizer.json``, a SentencePiece model, or a tiktoken vocabulary."""

import contextlib
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, processors

from services.common.errors import InvalidRequest
from services.common.model.json_object import (
    LARGEST_TOKENIZER,
    MOST_VOCABULARY,
    JsonObject,
    parse_json,
    read_bytes,
    read_json,
)
from services.common.text.sentencepiece_model import read_sentencepiece
from services.common.text.tiktoken_ranks import read_tiktoken, special_tokens
from services.common.text.tokenizer_class import read_model_type, read_tokenizer_config

_VOCABULARIES = ("tokenizer.model", "tiktoken.model", "*.tiktoken")
_LLAMA3_BOS = "<|begin_of_text|>"
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* +\d+\s")
_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*[^n\s]')
_MOST_RESERVED = 1 << 16  # unused ids between added tokens
_LONGEST_REASON = 200  # characters of a library's message
# Encoded once when a tokenizer is loaded, to detect a broken tokenizer at the start.
_PROBE = "The 2 quick brown foxes, naïve as 今日 🙂, jump.\n\tdef f(x):"


def read_backend(directory: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in ``directory``.

    ``tokenizer.json`` is complete. The other formats lack added tokens, BOS and EOS, which are in JSON files beside
    them. Raises ``InvalidRequest`` (field ``tokenizer``) that names the file and the reason.
    """
    whole = directory / "tokenizer.json"
    content = read_bytes(whole, most=LARGEST_TOKENIZER, field="tokenizer")
    if content is None:  # a converted tokenizer neither truncates nor pads
        return _convert(directory)
    if _PREFIX.search(content):
        _check_prefix(content, whole)
    with wrap_errors(whole, "loading it failed", "fetch the file again"):
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_truncation()
        backend.no_padding()
    return backend


def _check_prefix(content: bytes, path: Path) -> None:
    """Refuse merges without the ``continuing_subword_prefix``, for which ``tokenizers`` 0.23 aborts the process."""
    document = parse_json(content, str(path))
    model = document.get("model") if isinstance(document, dict) else None
    merges = model.get("merges") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(merges, list):
        return  # the library raises an error for it
    prefix = model.get("continuing_subword_prefix")
    pairs = (each.split(" ") if isinstance(each, str) else each for each in merges)
    seconds = (pair[1] if isinstance(pair, list) and len(pair) == 2 else None for pair in pairs)
    if not all(isinstance(second, str) and second.startswith(str(prefix)) for second in seconds):
        raise InvalidRequest(
            f"{path}: model.continuing_subword_prefix={reprlib.repr(prefix)} does not begin every second part of"
            " model.merges; fetch the file again, or name another directory with tokenizer=",
            field="tokenizer",
        )


def probe(backend: tokenizers.Tokenizer, directory: Path, size: int) -> None:
    """Encode and decode a text. Raises ``InvalidRequest`` if that fails, or gives an id of ``size`` or more."""
    with wrap_errors(directory, "its tokenizer encodes no text", "fetch the tokenizer's files again"):
        ids = backend.encode(_PROBE).ids
        if ids and max(ids) >= size:
            raise ValueError(f"it adds the token id {max(ids)} to texts, and its vocabulary has {size} ids")
        backend.decode(ids)


@contextlib.contextmanager
def wrap_errors(path: Path, what: str, fix: str) -> Iterator[None]:
    """Convert any exception of ``tokenizers`` and the converters to ``InvalidRequest``.

    The library raises plain ``Exception``. Panics of its Rust code are not subclasses of ``Exception``.
    """
    try:
        yield
    except InvalidRequest:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "..."
        raise InvalidRequest(
            f"{path}: {what}: {reason}; {fix}, or name another directory with tokenizer=", field="tokenizer"
        ) from error


def read_special_token(directory: Path, name: str) -> str | None:
    """Return a special token such as ``bos_token``, or None. Raises ``InvalidRequest``."""
    settings = _special_settings(directory)
    value = settings.values.get(name)
    content = value.get("content") if isinstance(value, dict) else value
    if not content:  # some files contain false
        return None
    if not isinstance(content, str):
        raise settings.wrong(name, "a string, or an object with the string content")
    return content


def _special_settings(directory: Path) -> JsonObject:
    settings = read_tokenizer_config(directory)
    merged = read_json(directory / "special_tokens_map.json") | dict(settings.values)
    return JsonObject(str(directory / "tokenizer_config.json"), merged, flag="tokenizer")


def _convert(directory: Path) -> tokenizers.Tokenizer:
    path = next((path for name in _VOCABULARIES for path in sorted(directory.glob(name))), None)
    content = None if path is None else read_bytes(path, most=LARGEST_TOKENIZER, field="tokenizer")
    if path is None or content is None:
        raise InvalidRequest(
            f"{directory} has neither tokenizer.json nor tokenizer.model nor a .tiktoken file: name a directory with"
            " tokenizer=",
            field="tokenizer",
        )
    settings = _special_settings(directory)
    with wrap_errors(path, "converting it failed", "save the tokenizer as tokenizer.json"):
        if _RANK_LINE.match(content):
            qwen = path.name.startswith("qwen") or read_model_type(directory).startswith("qwen")
            made = read_tiktoken(content, qwen=qwen)
            published = special_tokens(made.get_vocab_size())
        else:
            made, published = read_sentencepiece(content), []
        added = dict(_added_tokens(directory, settings))
        ends = {
            name: read_special_token(directory, f"{name}_token") or default
            for name, default in (("bos", "<s>"), ("eos", "</s>"))
            if settings.boolean(f"add_{name}_token")
        }
        if published and not added:
            made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in published])
            # Texts begin with BOS, which no file states either.
            if made.token_to_id(_LLAMA3_BOS) is not None and "add_bos_token" not in settings.values:
                ends["bos"] = read_special_token(directory, "bos_token") or _LLAMA3_BOS
        _add(made, added)
        add_ends(made, ends)
    return made


def _added_tokens(directory: Path, settings: JsonObject) -> Iterator[tuple[int, AddedToken]]:
    """Yield the ids and the tokens that were added to the vocabulary after training."""
    path = directory / "added_tokens.json"
    plain = JsonObject(str(path), read_json(path), flag="tokenizer")
    for content in plain.values:
        token = plain.integer(content, least=0, most=MOST_VOCABULARY - 1)
        yield token, AddedToken(content, normalized=False, special=True)
    described = settings.object("added_tokens_decoder")
    for number in described.values:
        entry = described.object(number)
        flags = {name: entry.boolean(name) for name in ("special", "normalized", "lstrip", "rstrip", "single_word")}
        if not (number.isascii() and number.isdecimal() and int(number) < MOST_VOCABULARY):
            raise ValueError(f"added_tokens_decoder has the key {number[:20]!r}, which is no token id")
        yield int(number), AddedToken(entry.text("content"), **flags)


def _add(made: tokenizers.Tokenizer, added: dict[int, AddedToken]) -> None:
    """Add the tokens with their ids. Unused ids between them get placeholders."""
    for token, entry in sorted(added.items()):
        found, size = made.token_to_id(entry.content), made.get_vocab_size()
        if found is None and token >= size:
            if token - size > _MOST_RESERVED:
                raise ValueError(f"token {entry.content!r} has the id {token}, but the vocabulary ends at {size}")
            reserved = [f"<|reserved_token_{each}|>" for each in range(size, token)]
            made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in reserved])
        elif found != token:
            raise ValueError(
                f"token {entry.content!r} has the id {token} in its settings, and another in the vocabulary"
            )
        (made.add_special_tokens if entry.special else made.add_tokens)([entry])


def add_ends(made: tokenizers.Tokenizer, ends: dict[str, str]) -> None:
    """Add the tokens in ``ends`` to texts: ``bos`` at their begin and ``eos`` at their end."""
    unknown = [token for token in ends.values() if made.token_to_id(token) is None]
    if unknown:
        raise ValueError(f"its texts should have {unknown[0]!r}, which is not in the vocabulary")
    if ends:
        single, second = (
            " ".join(f"{token}:{number}" for token in (ends.get("bos"), part, ends.get("eos")) if token)
            for number, part in enumerate(("$A", "$B"))
        )
        ids = [(token, made.token_to_id(token)) for token in dict.fromkeys(ends.values())]
        made.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {second}", special_tokens=ids
        )
