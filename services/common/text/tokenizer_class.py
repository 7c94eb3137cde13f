"""Applies the changes that a tokenizer class of transformers makes to a tokenizer.json.

Since version 5, some classes read only the vocabulary and the merges from the file, and use their own normalizer,
pre-tokenizer and decoder. This makes a difference for files that another class saved.
"""

from pathlib import Path

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers

from services.common.model.json_object import JsonObject, read_json
from services.common.text.tiktoken_ranks import QWEN_WORDS, byte_level_words

_BY_MODEL_TYPE = {
    "gemma2": "GemmaTokenizer",
    "gemma3": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "qwen3_moe": "Qwen2Tokenizer",
}
# Their hub repositories name wrong classes, which transformers overrides.
_ALWAYS_BY_MODEL_TYPE = ("qwen2",)
# transformers uses their files unchanged, whatever class they name.
_UNCHANGED = ("glm4_moe", "granite", "mistral", "mixtral", "olmo2", "phi3")


def read_tokenizer_config(directory: Path) -> JsonObject:
    """Return ``tokenizer_config.json``. Raises ``InvalidRequest``."""
    path = directory / "tokenizer_config.json"
    return JsonObject(str(path), read_json(path), flag="tokenizer")


def read_model_type(directory: Path) -> str:
    """Return ``model_type`` of ``config.json``, or an empty string. Raises ``InvalidRequest``."""
    path = directory / "config.json"
    return JsonObject(str(path), read_json(path)).text("model_type")


def apply_tokenizer_class(backend: tokenizers.Tokenizer, directory: Path) -> None:
    """Apply the changes of the tokenizer class in ``directory`` to ``backend``. Raises ``InvalidRequest``."""
    settings = read_tokenizer_config(directory)
    model_type = read_model_type(directory)
    if model_type in _UNCHANGED:
        return
    name = settings.text("tokenizer_class").removesuffix("Fast")
    if not name or model_type in _ALWAYS_BY_MODEL_TYPE:
        name = _BY_MODEL_TYPE.get(model_type, name)
    byte_level = isinstance(backend.decoder, decoders.ByteLevel)
    if name == "Qwen2Tokenizer" and byte_level:
        apply_qwen(backend, prefix=settings.boolean("add_prefix_space"))
    elif name == "LlamaTokenizer" and not byte_level:
        prefix = settings.boolean("add_prefix_space", True)
        apply_llama(backend, prefix=prefix, every_part=settings.boolean("legacy"))
    elif name == "GemmaTokenizer" and not byte_level:
        apply_gemma(backend)


def apply_qwen(backend: tokenizers.Tokenizer, *, prefix: bool = False) -> None:
    """Make ``backend`` split texts as Qwen 2 and 3 do. With ``prefix``, a text begins with a space."""
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level_words(QWEN_WORDS, add_prefix_space=prefix)


def apply_llama(backend: tokenizers.Tokenizer, *, prefix: bool, every_part: bool = False) -> None:
    """Make ``backend`` mark spaces as Llama 2 does.

    With ``prefix``, a text begins with a space. With ``every_part``, so does each part after a special token.
    """
    scheme = ("always" if every_part else "first") if prefix else "never"
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", left=1)] if prefix else []
    backend.decoder = _sentencepiece_decoder(*strip)


def apply_gemma(backend: tokenizers.Tokenizer) -> None:
    """Make ``backend`` mark spaces as Gemma does."""
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = _sentencepiece_decoder()


def apply_phi3(backend: tokenizers.Tokenizer) -> None:
    """Make ``backend`` mark spaces as Phi-3 does. Each part of a text gets a mark, also if it begins with a space."""
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    backend.decoder = _sentencepiece_decoder(decoders.Strip(" ", left=1))


def _sentencepiece_decoder(*steps: decoders.Decoder) -> decoders.Decoder:
    """Return the decoder of a vocabulary with marked spaces and byte tokens, with ``steps`` at its end."""
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps])
