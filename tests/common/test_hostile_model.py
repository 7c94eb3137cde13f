"""Files of a model that an author of models could write to harm its reader: each is refused in one sentence that names
the file and the field, before memory is allocated."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.fuzz import model_reader
from services.common.errors import InvalidRequest
from services.common.model.files import BUILTIN
from services.common.model.json_object import LARGEST_JSON

CONFIG = json.loads((BUILTIN / "config.json").read_text())
TOKENIZER = json.loads((BUILTIN / "tokenizer.json").read_text())
SETTINGS = json.loads((BUILTIN / "tokenizer_config.json").read_text())
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], object]


@pytest.fixture
def directory(tmp_path) -> Path:
    for path in BUILTIN.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def put(name: str, content: bytes | str) -> Change:
    """Replace a file of the model, which is a link to the built-in model's."""

    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return change


def config(**changes: Any) -> Change:
    return put("config.json", json.dumps(CONFIG | changes))


def rope(**settings: Any) -> Change:
    return config(rope_parameters={"rope_theta": 10000.0, **settings})


def tokenizer(**changes: Any) -> Change:
    return put("tokenizer.json", json.dumps(TOKENIZER | changes))


def settings(**changes: Any) -> Change:
    return put("tokenizer_config.json", json.dumps(SETTINGS | changes))


def tensor(**changes: Any) -> Change:
    """Change what the head of the weights says of the last norm. ``length``: what the file says of its head."""

    def change(directory: Path) -> None:
        content = (BUILTIN / "model.safetensors").read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        head = json.loads(content[8:end])
        length = changes.pop("length", None)
        head["model.norm.weight"] |= changes
        text = json.dumps(head).encode()
        size = (len(text) if length is None else length).to_bytes(8, "little")
        put("model.safetensors", size + text + content[end:])(directory)

    return change


def index(**placed: Any) -> Change:
    return put(INDEX, json.dumps({"weight_map": placed}))


def special(make: Callable[[Path], object]) -> Change:
    def change(directory: Path) -> None:
        (directory / "config.json").unlink()
        make(directory / "config.json")

    return change


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(LARGEST_JSON + 1)


# What is wrong -> stage that reads it, change, and what its sentence says.
HOSTILE: dict[str, tuple[str, Change, str]] = {
    "config is a list": ("card", put("config.json", "[]"), "config.json is a list; expected a JSON object"),
    "config is null": ("card", put("config.json", "null"), "config.json is null; expected a JSON object"),
    "config is not UTF-8": ("card", put("config.json", b'{"a": "\xff"}'), "config.json is not UTF-8 .byte 7"),
    "config is UTF-16": ("card", put("config.json", json.dumps(CONFIG).encode("utf-16")), "config.json is not UTF-8"),
    "config is truncated": ("card", put("config.json", json.dumps(CONFIG)[:-9]), "config.json is not valid JSON"),
    "config is deep": ("card", put("config.json", "[" * 10**6), "config.json is not valid JSON: .* deep"),
    "config is deep enough": ("card", config(a=json.loads("[" * 90 + "]" * 90)), "config.json is not valid .* deep"),
    "config has a long number": ("card", put("config.json", '{"a": 1%s}' % ("0" * 5000)), "too many digits"),
    "config has half a character": ("card", config(a="\ud800"), "config.json is not valid JSON: a text is not Unicode"),
    "config is large": ("card", special(sparse), r"config.json has 33,554,433 bytes; at most 33,554,432 are read"),
    "config is a directory": ("card", special(Path.mkdir), "config.json is not a regular file"),
    "config is a pipe": ("card", special(os.mkfifo), "config.json is not a regular file"),
    "config is a device": ("card", special(lambda path: path.symlink_to("/dev/zero")), "is not a regular file"),
    "config is a loop": ("card", special(lambda path: path.symlink_to(path)), "config.json (cannot be read|does not)"),
    "vocabulary of 1e9": ("card", config(vocab_size=10**9), r"vocab_size=1000000000 is not supported; expected an int"),
    "vocabulary of 1e18": ("text", config(vocab_size=10**18), "vocab_size=10+ is not supported; expected an integer"),
    "vocabulary of true": ("card", config(vocab_size=True), "vocab_size=True is not supported; expected an integer"),
    "vocabulary of NaN": ("card", config(vocab_size=float("nan")), "vocab_size=nan is not supported"),
    "context of 1e18": ("card", config(max_position_embeddings=10**18), "max_position_embeddings=10+ is not supp"),
    "context below 0": ("card", config(max_position_embeddings=-5), "max_position_embeddings=-5 is not supported"),
    "context is a text": ("card", config(max_position_embeddings="8"), "max_position_embeddings='8' is not supported"),
    "end is a text": ("card", put("generation_config.json", '{"eos_token_id": "</s>"}'), "eos_token_id='</s>' is not"),
    "ends are negative": ("card", put("generation_config.json", '{"eos_token_id": [-1]}'), r"eos_token_id=\[-1\]"),
    "generation is a list": ("card", put("generation_config.json", "[1]"), "generation_config.json is a list"),
    "layers of 1e9": ("worker", config(num_hidden_layers=10**9), r"num_hidden_layers=10+ is .* from 1 to 4,096"),
    "layers below 0": ("worker", config(num_hidden_layers=-1), "num_hidden_layers=-1 is not supported"),
    "hidden of 1e18": ("worker", config(hidden_size=10**18), "hidden_size=10+ is not supported"),
    "hidden of 1e6": ("worker", config(hidden_size=10**6), r"has shape .*, config.json asks for .2048, 1000000."),
    "heads of 0": ("worker", config(num_attention_heads=0), "num_attention_heads=0 is not supported"),
    "more heads than width": ("worker", config(num_attention_heads=999, head_dim=None), "hidden_size=384 .* at least"),
    "inner size is infinite": ("worker", config(intermediate_size=float("inf")), "intermediate_size=inf is not supp"),
    "norm is a list": ("worker", config(rms_norm_eps=[]), r"rms_norm_eps=\[\] is not supported; expected a number"),
    "bias is a text": ("worker", config(attention_bias="no"), "attention_bias='no' is not .* expected true or false"),
    "architectures is a number": ("worker", config(architectures=5), "architectures=5 .* expected a list of strings"),
    "architectures has a list": ("worker", config(architectures=[[]]), r"architectures=\[\[\]\] is not supported"),
    "activation is a list": ("worker", config(hidden_act=[]), r"hidden_act=\[\] is not supported"),
    "rope is a text": ("card", config(rope_parameters="yes"), "rope_parameters='yes' is not .* expected an object"),
    "rope type is a list": ("card", rope(rope_type=[]), r"rope_parameters.rope_type=\[\] is not supported"),
    "rope factor is a text": ("card", rope(rope_type="linear", factor="4"), "rope_parameters.factor='4' is not supp"),
    "rope factor is 1e300": ("card", rope(rope_type="dynamic", factor=1e300), r"rope_parameters.factor=1e\+300 is not"),
    "rope theta is 0": ("worker", rope(rope_theta=0), "rope_parameters.rope_theta=0 is not supported"),
    "rope frequencies are equal": (
        "worker",
        rope(rope_type="llama3", factor=8, low_freq_factor=2, high_freq_factor=2),
        "low_freq_factor=2 is not supported; expected less than high_freq_factor=2",
    ),
    "rope factors are texts": (
        "worker",
        rope(rope_type="longrope", short_factor=["a"] * 32, long_factor=[1.0] * 32),
        "short_factor=.* is not supported; expected a list of numbers",
    ),
    "tokenizer is truncated": (
        "text",
        put("tokenizer.json", json.dumps(TOKENIZER)[:-40]),
        "tokenizer.json: loading it failed: .*; fetch the file again",
    ),
    "tokenizer is a list": ("text", put("tokenizer.json", "[]"), "tokenizer.json: loading it failed"),
    "tokenizer is not UTF-8": ("text", put("tokenizer.json", b"\xff" * 9), "tokenizer.json: loading it failed"),
    "tokenizer of unknown kind": ("text", tokenizer(model={"type": "X"}), "tokenizer.json: loading it failed"),
    "tokenizer without decoder": ("text", tokenizer(decoder=None), "the tokenizer's decoder none is not supported"),
    "token id of 4e9": (
        "text",
        tokenizer(model=TOKENIZER["model"] | {"vocab": TOKENIZER["model"]["vocab"] | {"zz": 2**32 - 1}}),
        "the tokenizer has the token id 4,294,967,295; at most 4,194,304 ids are supported",
    ),
    "merges without their prefix": (
        "text",
        tokenizer(model=TOKENIZER["model"] | {"continuing_subword_prefix": "\x00"}),
        "tokenizer.json: model.continuing_subword_prefix=.* does not begin every second part of model.merges",
    ),
    "template is a number": ("text", settings(chat_template=5), "chat_template=5 is not supported; expected a string"),
    "templates are numbers": ("text", settings(chat_template=[1]), r"chat_template=\[1\] is not supported"),
    "template is deep": ("text", settings(chat_template="{{ " + "(" * 5000), "chat template does not compile"),
    "template is long": ("text", settings(chat_template="x" * 300_000), "chat template has 300,000 characters"),
    "template is not UTF-8": ("text", put("chat_template.jinja", b"\xff"), "chat_template.jinja is not UTF-8"),
    "class is a number": ("text", settings(tokenizer_class=7), "tokenizer_class=7 is not supported; expected a string"),
    "begin is a number": ("text", settings(bos_token=7), "bos_token=7 is not supported; expected a string"),
    "settings are a text": ("text", put("tokenizer_config.json", '"a"'), "tokenizer_config.json is a string"),
    "weights are empty": ("worker", put("model.safetensors", b""), r"model.safetensors .0 bytes. does not begin with"),
    "head is longer than the file": ("worker", tensor(length=10**9), "model.safetensors .* does not begin with"),
    "head of 2**63 bytes": ("worker", tensor(length=2**63), "model.safetensors .* does not begin with"),
    "head is cut": ("worker", tensor(length=100), "model.safetensors .* its header is not valid JSON"),
    "tensors overlap": ("worker", tensor(data_offsets=[0, 768]), "do not fit its shape and its neighbours"),
    "tensor behind the end": ("worker", tensor(data_offsets=[10**12, 10**12 + 768]), "do not fit its shape"),
    "tensor of negative size": ("worker", tensor(shape=[-384]), "shape and data_offsets must be integers from 0"),
    "tensor of unknown dtype": ("worker", tensor(dtype="F7"), "model.norm.weight: dtype 'F7' is unknown"),
    "tensor of integers": ("worker", tensor(dtype="I16"), "model.norm.weight has dtype I16; expected one of BF16"),
    "tensor of another shape": ("worker", tensor(shape=[2, 192]), r"has shape \[2, 192\], config.json asks for .384"),
    "index is a list": ("worker", put(INDEX, "[]"), "index.json is no index .*is a list"),
    "index has no map": ("worker", put(INDEX, '{"metadata": {}}'), "index.json is no index .weight_map must be an obj"),
    "index names a number": ("worker", index(a=5), "weight_map: 5 is not the name of a file in the model"),
    "index without its files": ("worker", index(a="b.safetensors"), "b.safetensors does not exist"),
    "index leaves the directory": ("worker", index(a="../b.safetensors"), "'../b.safetensors' is not the name of a"),
    "index names the root": ("worker", index(a="/etc/b.safetensors"), "'/etc/b.safetensors' is not the name of a file"),
    "index names a zero byte": ("worker", index(a="b\0.safetensors"), r"'b\\x00.safetensors' is not the name of a"),
    "index names other files": ("worker", index(a="config.json"), "'config.json' is no safetensors file"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence(what, directory):
    stage, change, sentence = HOSTILE[what]
    change(directory)
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        getattr(model_reader, stage)(str(directory))
    assert "\n" not in refused.value.message
    assert refused.value.field in ("model", "tokenizer")


def test_the_model_itself_is_read(directory):
    for stage in model_reader.STAGES:
        stage(str(directory))


def test_weights_that_do_not_fit_the_device_are_refused_before_they_are_allocated(directory, monkeypatch):
    monkeypatch.setattr(model_reader, "_DEVICE_MEMORY", 1 << 20)
    with pytest.raises(InvalidRequest, match=r"config.json describes weights and a table of positions of 0.0 GiB"):
        model_reader.worker(str(directory))


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    """Files of a snapshot are links to files outside of it."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    shutil.copytree(BUILTIN, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    (snapshot / "model.safetensors").rename(snapshot / "part.safetensors")
    head = (blobs / "model.safetensors").read_bytes()
    names = json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")])
    placed = {name: "part.safetensors" for name in names if name != "__metadata__"}
    (snapshot / INDEX).write_text(json.dumps({"weight_map": placed}))
    model_reader.worker(str(snapshot))
