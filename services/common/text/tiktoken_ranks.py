"""Converts a tiktoken vocabulary (lines of base64 bytes and a rank) to a ``tokenizers.Tokenizer``."""

import base64
import binascii

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from services.common.text.vocabulary import byte_level_text

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# The published splitting rules, which the file does not contain: words with one leading non-letter, digits,
# punctuation, white space. Llama 3 takes up to three digits, Qwen one.
LLAMA3_WORDS = rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}"
QWEN_WORDS = rf"{_LETTERS}\p{{N}}{_REST}"

_LLAMA3_RANKS, _QWEN_RANKS = 128_000, 151_643
# the first special tokens of Llama 3.1; the others are reserved
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
)
# Bytes of a token, each of whose splits is examined. Published vocabularies have up to 256.
LONGEST_TOKEN = 1024
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def read_tiktoken(content: bytes, *, qwen: bool) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file's ``content``, without special tokens.

    With ``qwen``, texts are normalized to NFC and split as Qwen does. Raises ``ValueError`` for an invalid vocabulary.
    """
    ranks = _read_ranks(content)
    if max(map(len, ranks)) > LONGEST_TOKEN:
        raise ValueError(f"it has a token of more than {LONGEST_TOKEN} bytes")
    merges = []
    for token, rank in ranks.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        found = [pair for pair in splits if pair[0] in ranks and pair[1] in ranks]
        found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, pair) for pair in found]
    merges.sort(key=lambda merge: merge[0])
    texts = {token: byte_level_text(token) for token in ranks}
    vocabulary = {texts[token]: rank for token, rank in ranks.items()}
    pairs = [(texts[left], texts[right]) for _, (left, right) in merges]
    # As in tiktoken, a word that is a token is used without merging its parts.
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, fuse_unk=False, ignore_merges=True))
    if qwen:
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = byte_level_words(QWEN_WORDS if qwen else LLAMA3_WORDS)
    made.decoder = decoders.ByteLevel()
    return made


def byte_level_words(rule: str, *, add_prefix_space: bool = False) -> pre_tokenizers.Sequence:
    """Return the pre-tokenizer that splits texts by ``rule``, and writes each byte as a character."""
    words = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    byte_alphabet = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    return pre_tokenizers.Sequence([words, byte_alphabet])


def _read_ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
    if not ranks:
        raise ValueError("it has no tokens")
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not the consecutive numbers from 0")
    return ranks


def special_tokens(ranks: int) -> list[str]:
    """Return the special tokens of the published model with ``ranks`` tokens, or none for an unknown model.

    Their ids begin at ``ranks``. The vocabulary files do not contain them.
    """
    if ranks == _LLAMA3_RANKS:
        known = dict(enumerate(_LLAMA3_SPECIAL))
        return [known.get(place) or f"<|reserved_special_token_{place - 8}|>" for place in range(256)]
    if ranks == _QWEN_RANKS:
        return [*_QWEN_SPECIAL, *(f"<|extra_{place}|>" for place in range(205))]
    return []
