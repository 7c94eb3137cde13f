"""Models with wrong files, read as the services read them, in a process with bounded memory and time.

Each must be read, or refused in one sentence that names a file or a flag. A traceback, a hang, and memory or CPU time
beyond the bounds are findings. A model is a function of the seed and its number.
"""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from bench.fuzz.canary import random_of
from bench.fuzz.config import FuzzConfig
from bench.fuzz.findings import Findings, Wrong
from bench.fuzz.values import broken, mutated, write
from services.common.model.files import BUILTIN
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint

_LONGEST_MESSAGE = 1500
_NAMED = (
    *(".json", ".jinja", ".model", ".tiktoken", ".safetensors"), "flag model=", "tokenizer", "chat template", "tensors",
)  # fmt: skip
_SIZES = (-1, 0, 1, 3, 10**6, 10**9, 10**18, 2**64, 1e18, float("nan"), float("inf"), True, "64", None, [], {})
_WEIGHTED = ("config.json",) * 4
_TEMPLATES = (
    "{{ 9 ** 9 ** 9 }}", "{{ 'a' * 10 ** 9 }}", "{% for a in range(10 ** 9) %}{{ a }}{% endfor %}", "{{ (" * 3000,
    "{% if a %}" * 3000, "{{ a" + ".b" * 20_000 + " }}", "{% include '/etc/passwd' %}", "{{ self.__init__ }}",
    "{{ 1" + "0" * 5000 + " }}", "{% raw %}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "\ud800",
)  # fmt: skip


class ModelFuzzer:
    """A fuzzer that makes and reads models one after the other in one directory. Used by one thread."""

    def __init__(self, config: FuzzConfig, directory: Path, findings: Findings) -> None:
        self._config, self._findings = config, findings
        self._bases, self._case = directory / "bases", directory / "case"
        self._reader: Reader | None = None
        self._outcomes: Counter[str] = Counter()

    def run(self, count: int) -> dict[str, Any]:
        """Make and read ``count`` models."""
        bases = make_bases(self._bases)
        try:
            for number in range(self._config.first, self._config.first + count):
                changed = self._make(random_of(self._config.seed, "models", number), bases)
                try:
                    self._read()
                except Wrong as wrong:
                    self._findings.add("models", number, wrong.kind, f"{changed}: {wrong}", self._content(changed))
                    if wrong.kind == "ended":
                        self._close()
        finally:
            self._close()
        return {"models": count, **dict(self._outcomes)}

    def _make(self, random: Random, bases: list[Path]) -> str:
        """Copy a model and change a file of it. Returns the file's name."""
        base = random.choice(bases)
        shutil.rmtree(self._case, ignore_errors=True)
        self._case.mkdir()
        for path in base.iterdir():
            (self._case / path.name).symlink_to(path)
        names = sorted(path.name for path in base.iterdir() if path.suffix in CHANGES)
        name = random.choice([*names, *_WEIGHTED])
        target = self._case / name
        content = target.read_bytes()
        target.unlink()
        if random.random() < 0.02:
            _replace(random, target)
        else:
            target.write_bytes(CHANGES[target.suffix](random, content))
        return name

    def _read(self) -> None:
        if self._reader is None:
            self._reader = Reader()
        failed = self._reader.read(self._case)
        self._outcomes["refused" if failed else "read"] += 1
        for each in failed:
            if "raised" in each:
                raise Wrong("memory" if "MemoryError" in each["raised"] else "traceback", each["raised"])
            message = each["refused"]
            if "\n" in message or len(message) > _LONGEST_MESSAGE or not any(name in message for name in _NAMED):
                raise Wrong("message", f"{each['stage']}: {message[:_LONGEST_MESSAGE]}")

    def _content(self, name: str) -> bytes:
        path = self._case / name
        return path.read_bytes() if path.is_file() else b""

    def _close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


class Reader:
    """The child process that reads models."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "bench.fuzz.model_reader"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, text=True, **pipes)
        if self._process.stdout.readline() != "\n":
            raise RuntimeError("the process that reads models did not start")

    def read(self, directory: Path) -> list[dict[str, str]]:
        """Return the stages that failed. Raises ``Wrong`` if the process ends."""
        print(directory, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            status = self._process.wait()
            raise Wrong("ended", f"the reader ended with status {status} (-27: it took too long)")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def make_bases(directory: Path) -> list[Path]:
    """Write the models to change, with each architecture, rotation, kind of tokenizer and layout of files."""
    made = [directory / name for name in ("llama", "mistral", "qwen2", "qwen3", "tiktoken", "builtin")]
    llama, mistral, qwen2, qwen3, tiktoken, builtin = made
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32}
    make_checkpoint(llama, "llama", sharded=True, rope_scaling=LLAMA3_ROPE, **small)
    make_checkpoint(mistral, "mistral", tokenizer="sentencepiece", sliding_window=64, **small)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    make_checkpoint(qwen2, "qwen2", rope_scaling=yarn, use_sliding_window=True, sliding_window=64, **small)
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    longrope = {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 512, **factors}
    make_checkpoint(qwen3, "qwen3", rope_scaling=longrope, tied=True, **small)
    shutil.copytree(llama, tiktoken)
    (tiktoken / "tokenizer.json").unlink()
    (tiktoken / "tokenizer.model").write_bytes(_ranks())
    added = {str(258 + number): {"content": f"<|{name}|>", "special": True} for number, name in enumerate("abc")}
    settings = {"add_bos_token": True, "bos_token": "<|a|>", "added_tokens_decoder": added, "tokenizer_class": "X"}
    (tiktoken / "tokenizer_config.json").write_text(json.dumps(settings))
    (tiktoken / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    (tiktoken / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": [1, 2], "top_k": 5}')
    shutil.copytree(BUILTIN, builtin, ignore=shutil.ignore_patterns("README*", "*LICENSE"))
    return made


def _ranks() -> bytes:
    """A tiktoken vocabulary of all bytes and two pairs."""
    from base64 import b64encode

    tokens = [bytes([byte]) for byte in range(256)] + [b"ab", b"th"]
    return b"".join(b"%s %d\n" % (b64encode(token), rank) for rank, token in enumerate(tokens))


def _change_json(random: Random, content: bytes) -> bytes:
    if random.random() < 0.15:
        return broken(random, content)
    document = json.loads(content)
    for _ in range(random.choice((1, 1, 2, 4))):
        holder = document
        if isinstance(document.get("model"), dict) and random.random() < 0.8:  # a tokenizer's vocabulary is long
            holder = document["model"] if random.random() < 0.4 else document
        small = {name: part for name, part in holder.items() if name not in ("vocab", "merges", "model")}
        if random.random() < 0.3 and small:
            holder[random.choice(list(small))] = random.choice(_SIZES)
        elif small is not holder and random.random() < 0.9:
            rest = {name: part for name, part in holder.items() if name not in small}
            holder.clear()
            holder.update(mutated(random, small) | rest)
        else:
            document = mutated(random, document)
            if not isinstance(document, dict):
                break
    return write(random, document)


def _change_template(random: Random, content: bytes) -> bytes:
    if random.random() < 0.5:
        return random.choice(_TEMPLATES).encode(errors="surrogatepass")
    return broken(random, content)


def _change_bytes(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 2, 10))):
        changed[random.randrange(len(changed))] = random.randrange(256)
    return broken(random, bytes(changed)) if random.random() < 0.4 else bytes(changed)


def _change_weights(random: Random, content: bytes) -> bytes:
    """Change a safetensors file: its length, its head, or its size."""
    length = int.from_bytes(content[:8], "little")
    head, data = content[8 : 8 + length], content[8 + length :]
    kind = random.randrange(5)
    if kind == 0:
        return random.choice((0, 1, length - 1, length + 1, 10**9, 2**63)).to_bytes(8, "little") + content[8:]
    if kind == 1:
        return content[: random.randrange(len(content))] + bytes(random.choice((0, 0, 100)))
    if kind == 2:
        head = broken(random, head)
    else:
        document = json.loads(head)
        for _ in range(random.choice((1, 3))):
            document = mutated(random, document)
            part = random.choice(list(document)) if isinstance(document, dict) and document else None
            if part and isinstance(document[part], dict) and random.random() < 0.5:
                sizes = [random.choice(_SIZES) for _ in range(random.choice((1, 2, 3)))]
                document[part][random.choice(("shape", "data_offsets"))] = sizes
        head = write(random, document)
    return len(head).to_bytes(8, "little") + head + data


CHANGES: dict[str, Callable[[Random, bytes], bytes]] = {
    ".json": _change_json,
    ".jinja": _change_template,
    ".model": _change_bytes,
    ".safetensors": _change_weights,
}


def _replace(random: Random, target: Path) -> None:
    """Replace a file by something that is no regular file."""
    kind = random.randrange(5)
    if kind == 0:
        target.mkdir()
    elif kind == 1:
        os.mkfifo(target)
    elif kind == 2:
        target.symlink_to(target)
    elif kind == 3:
        target.symlink_to("/dev/zero")
    else:
        target.symlink_to("nowhere")
