"""Converts a SentencePiece model (``tokenizer.model``) to a ``tokenizers.Tokenizer``.

For models of the types BPE and Unigram, the tokens are those of the sentencepiece library (Kudo and Richardson 2018).
There are two differences:

* A combining mark after a character that the model's normalization replaces may be lost (a limit of ``tokenizers``). *
With user-defined symbols, texts are split at the symbols before spaces are marked. A text that begins with a symbol has
no space mark before it, and spaces at the begin or end of a text have one mark more or less.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

LONGEST_TOKEN = 1024  # characters of a piece; each of its splits is examined
_MOST_SPLIT = 1 << 27  # characters of all splits of all pieces; published vocabularies have 20 million
_MOST_MERGES = 1 << 21  # published vocabularies have up to 0.6 million
_MARK = "▁"  # stands for a space
_UNIGRAM, _BPE = 1, 2  # ``TrainerSpec.ModelType``
_KINDS = {_UNIGRAM: "unigram", _BPE: "bpe", 3: "word", 4: "char"}
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # ``ModelProto.SentencePiece.Type``
# added to the lowest score for pieces that must never be chosen
_NEVER = -1e4

# the fields of sentencepiece_model.proto (proto2) that are used: name, number, type, default
_FIELDS = {
    "Piece": [("piece", 1, "STRING", ""), ("score", 2, "FLOAT", "0"), ("type", 3, "INT32", "1")],
    "Trainer": [
        ("model_type", 3, "INT32", "1"),
        ("treat_whitespace_as_suffix", 24, "BOOL", "false"),
        ("byte_fallback", 35, "BOOL", "false"),
        ("unk_id", 40, "INT32", "0"),
    ],
    "Normalizer": [
        ("precompiled_charsmap", 2, "BYTES", ""),
        ("add_dummy_prefix", 3, "BOOL", "true"),
        ("remove_extra_whitespaces", 4, "BOOL", "true"),
        ("escape_whitespaces", 5, "BOOL", "true"),
    ],
}
_PARTS = [("pieces", 1, "Piece"), ("trainer", 2, "Trainer"), ("normalizer", 3, "Normalizer")]


def read_sentencepiece(content: bytes) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model file's ``content``.

    Raises ``ValueError`` if it is not a SentencePiece model, or if a ``tokenizers.Tokenizer`` cannot represent it.
    """
    model: Any = _model_class()()  # its fields are described at run time
    try:
        model.ParseFromString(content)
    except message.DecodeError as error:
        raise ValueError("it is not a SentencePiece model") from error
    if not model.pieces:
        raise ValueError("it is not a SentencePiece model: it has no pieces")
    if max(len(piece.piece) for piece in model.pieces) > LONGEST_TOKEN:
        raise ValueError(f"it has a piece of more than {LONGEST_TOKEN} characters")
    trainer, rules = model.trainer, model.normalizer
    if not 0 <= trainer.unk_id < len(model.pieces):
        raise ValueError(f"its unk_id is {trainer.unk_id}, and it has {len(model.pieces)} pieces")
    if trainer.model_type not in (_UNIGRAM, _BPE):
        raise ValueError(f"SentencePiece models of kind {_KINDS.get(trainer.model_type)!r} are not supported")
    if trainer.treat_whitespace_as_suffix or not rules.escape_whitespaces:
        raise ValueError("SentencePiece models whose pieces do not begin with the space mark are not supported")
    made = tokenizers.Tokenizer(_unigram(model) if trainer.model_type == _UNIGRAM else _bpe(model))
    symbols = [piece.piece for piece in model.pieces if piece.type == _USER_DEFINED]
    made.normalizer = normalizers.Sequence(list(_normalizers(rules, cut=bool(symbols))))
    if symbols:
        scheme = "first" if rules.add_dummy_prefix else "never"
        made.pre_tokenizer = pre_tokenizers.Metaspace(_MARK, prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(" ", left=1)] if rules.add_dummy_prefix else []
    made.decoder = decoders.Sequence([decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    made.add_tokens([AddedToken(symbol, normalized=False) for symbol in symbols])
    special = [piece.piece for piece in model.pieces if piece.type in (_UNKNOWN, _CONTROL)]
    made.add_special_tokens([AddedToken(piece, normalized=False, special=True) for piece in special])
    return made


def _bpe(model: Any) -> models.BPE:
    ids = {piece.piece: token for token, piece in enumerate(model.pieces)}
    # Symbols are found before merging. Unknown, control and byte pieces never result from a merge.
    normal = {piece.piece: piece.score for piece in model.pieces if piece.type == 1}
    unknown = model.pieces[model.trainer.unk_id].piece
    return bpe_of_scores(ids, normal, unknown, byte_fallback=model.trainer.byte_fallback)


def bpe_of_scores(
    ids: Mapping[str, int], scores: Mapping[str, float], unknown: str | None, *, byte_fallback: bool
) -> models.BPE:
    """Return a BPE model of the tokens ``ids``. ``unknown`` is the token for other characters.

    Its merges are all pairs of pieces in ``scores`` that form another one, best score first. Raises ``ValueError`` for
    pieces that are too long, or have too many merges.
    """
    if sum(len(piece) ** 2 for piece in scores) > _MOST_SPLIT or max(map(len, scores), default=0) > LONGEST_TOKEN:
        raise ValueError("its pieces are too long")
    merges = []
    for piece, score in scores.items():
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
        found.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        merges += [(-score, pair) for pair in found]
        if len(merges) > _MOST_MERGES:
            raise ValueError(f"its pieces have more than {_MOST_MERGES:,} merges")
    merges.sort(key=lambda merge: merge[0])
    return models.BPE(
        vocab=dict(ids),
        merges=[pair for _, pair in merges],
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )


def _unigram(model: Any) -> models.Unigram:
    never = min(piece.score for piece in model.pieces) + _NEVER
    unusable = (_UNUSED, _CONTROL)
    vocabulary = [(piece.piece, never if piece.type in unusable else piece.score) for piece in model.pieces]
    return models.Unigram(vocabulary, model.trainer.unk_id, model.trainer.byte_fallback)


def _normalizers(rules: Any, *, cut: bool) -> Iterator[normalizers.Normalizer]:
    """Yield the steps of normalization.

    With ``cut``, they apply to the text between symbols. A pre-tokenizer then marks the spaces, and adds a prefix only
    at the begin of a text.
    """
    if rules.precompiled_charsmap:
        yield normalizers.Precompiled(rules.precompiled_charsmap)
    if rules.remove_extra_whitespaces:
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if not cut:
        if rules.remove_extra_whitespaces:
            yield normalizers.Replace(Regex(r"\A | \z"), "")
        if rules.add_dummy_prefix:
            yield normalizers.Prepend(_MARK)
        yield normalizers.Replace(" ", _MARK)


@cache
def _model_class() -> type[message.Message]:
    """Return the message class of a model. Its pool is separate, since the sentencepiece package registers the same."""
    file = descriptor_pb2.FileDescriptorProto(name="tokasaurus/sentencepiece.proto", package="tokasaurus.sentencepiece")
    file.syntax = "proto2"
    for name, fields in _FIELDS.items():
        described = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            value = descriptor_pb2.FieldDescriptorProto.Type.Value(f"TYPE_{kind}")
            added = described.field.add(name=field, number=number, type=value, label=1)
            if default:
                added.default_value = default
    whole = file.message_type.add(name="Model")
    for field, number, part in _PARTS:
        label = 3 if field == "pieces" else 1
        kind_name = f".{file.package}.{part}"
        whole.field.add(name=field, number=number, type=11, label=label, type_name=kind_name)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{file.package}.Model"))
