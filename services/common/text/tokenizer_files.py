"""A model's tokenizer from the file that the model was published with: ``tokenizer.json``, a SentencePiece model, or a
tiktoken vocabulary."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from services.common.errors import InvalidRequest
from services.common.model_files import read_json
from services.common.text.sentencepiece_model import read_sentencepiece
from services.common.text.tiktoken_ranks import read_tiktoken, special_tokens

_VOCABULARIES = ("tokenizer.model", "tiktoken.model", "*.tiktoken")
_LLAMA3_BOS = "<|begin_of_text|>"
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* +\d+\s")


def read_backend(directory: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer in ``directory``. ``tokenizer.json`` is taken as it is; the other files say nothing of the
    tokens that were added later and of BOS and EOS, which are in the JSON files beside them.

    Raises ``InvalidRequest`` (field ``tokenizer``) naming the file and the reason.
    """
    whole = directory / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(whole)) if whole.exists() else _convert(directory)
    backend.no_truncation()
    backend.no_padding()
    return backend


def _convert(directory: Path) -> tokenizers.Tokenizer:
    path = next((path for name in _VOCABULARIES for path in sorted(directory.glob(name))), None)
    if path is None:
        raise InvalidRequest(
            f"{directory} has neither tokenizer.json nor tokenizer.model nor a .tiktoken file: name a directory with"
            " tokenizer=",
            field="tokenizer",
        )
    settings = read_json(directory / "special_tokens_map.json") | read_json(directory / "tokenizer_config.json")
    content = path.read_bytes()
    try:
        if _RANK_LINE.match(content):
            model_type = read_json(directory / "config.json").get("model_type", "")
            made = read_tiktoken(content, qwen=path.name.startswith("qwen") or model_type.startswith("qwen"))
            published = special_tokens(made.get_vocab_size())
        else:
            made, published = read_sentencepiece(content), []
        added = dict(_added_tokens(directory, settings))
        if published and not added:
            made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in published])
            if made.token_to_id(_LLAMA3_BOS) is not None:  # its texts begin with it, which no file says either
                settings = {"add_bos_token": True, "bos_token": _LLAMA3_BOS} | settings
        _add(made, added)
        _add_ends(made, settings)
    except ValueError as error:
        raise InvalidRequest(
            f"{path}: converting it failed: {error}; save the tokenizer as tokenizer.json, or name another directory"
            " with tokenizer=",
            field="tokenizer",
        ) from error
    return made


def _added_tokens(directory: Path, settings: dict[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """Yield the ids and the tokens that were added to the vocabulary after training."""
    for content, token in read_json(directory / "added_tokens.json").items():
        yield token, AddedToken(content, normalized=False, special=True)
    for token, entry in (settings.get("added_tokens_decoder") or {}).items():
        flags = {name: bool(entry.get(name)) for name in ("special", "normalized", "lstrip", "rstrip", "single_word")}
        yield int(token), AddedToken(entry["content"], **flags)


def _add(made: tokenizers.Tokenizer, added: dict[int, AddedToken]) -> None:
    """Add the tokens, each under its id. Ids between them that no token has get placeholders."""
    for token, entry in sorted(added.items()):
        found, size = made.token_to_id(entry.content), made.get_vocab_size()
        if found is None and token >= size:
            reserved = [f"<|reserved_token_{each}|>" for each in range(size, token)]
            made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in reserved])
        elif found != token:
            raise ValueError(f"token {entry.content!r} is said to have id {token}, which is not its id there")
        (made.add_special_tokens if entry.special else made.add_tokens)([entry])


def _add_ends(made: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
    """Let texts begin with BOS and end with EOS as ``add_bos_token`` and ``add_eos_token`` say; absent is no."""
    ends: dict[str, str] = {}
    for name, default in (("bos", "<s>"), ("eos", "</s>")):
        if settings.get(f"add_{name}_token"):
            token = settings.get(f"{name}_token") or default
            ends[name] = token["content"] if isinstance(token, dict) else token
    unknown = [token for token in ends.values() if made.token_to_id(token) is None]
    if unknown:
        raise ValueError(f"its texts should have {unknown[0]!r}, which is no token there")
    if ends:
        single, second = (
            " ".join(f"{token}:{number}" for token in (ends.get("bos"), part, ends.get("eos")) if token)
            for number, part in enumerate(("$A", "$B"))
        )
        ids = [(token, made.token_to_id(token)) for token in dict.fromkeys(ends.values())]
        made.post_processor = processors.TemplateProcessing(
            single=single, pair=f"{single} {second}", special_tokens=ids
        )
