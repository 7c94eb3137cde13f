"""The files of a checkpoint: are all there, and whole? Their heads are read, their weights are not."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INDEX = "model.safetensors.index.json"
_ALONE = "model.safetensors"
_LARGEST_HEAD = 100 << 20  # as the format says
_GIT_LFS = b"version https://git-lfs"


class Broken(Exception):
    """A file is not what it should be; ``fix``: what to do."""

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(text)
        self.fix = fix


@dataclass(frozen=True)
class Shard:
    """One file."""

    path: Path
    size: int  # bytes
    shapes: dict[str, tuple[int, ...]]  # of its tensors


def read_shards(directory: Path) -> Iterator[Shard | Broken]:
    """Each file that the index names, or the only one there is."""
    try:
        placed = _read_index(directory)
    except Broken as broken:
        yield broken
        return
    if not placed and not (directory / _ALONE).exists():
        yield Broken(
            f"{directory / _ALONE} does not exist, nor an index of several files: there are no weights",
            "toka-download model= with the hub's id fetches a whole model; load_format=dummy makes random weights",
        )
        return
    for name in sorted(set(placed.values())) or [_ALONE]:
        try:
            shard = read_shard(directory / name)
        except Broken as broken:
            yield broken
            continue
        if absent := [tensor for tensor, file in placed.items() if file == name and tensor not in shard.shapes]:
            yield Broken(
                f"{_INDEX} says that {name} has {absent[0]}{_more(absent)}, which it has not",
                "fetch both again: they are of different versions",
            )
        else:
            yield shard


def _read_index(directory: Path) -> dict[str, str]:
    """Tensor -> file; empty where there is none."""
    path = directory / _INDEX
    if not path.exists():
        if not (directory / _ALONE).exists() and any(directory.glob("*.bin")):
            raise Broken(
                f"{directory} has weights as *.bin only",
                "convert them to safetensors, the only format read: transformers' save_pretrained writes it",
            )
        return {}
    try:
        placed = json.loads(path.read_bytes())["weight_map"]
        return {str(tensor): str(file) for tensor, file in placed.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise Broken(f"{path} is no index ({type(error).__name__}: {error})", "fetch the file again") from error


def read_shard(path: Path) -> Shard:
    """Its head, checked against its size. Raises ``Broken``."""
    again = "fetch the file again (toka-download model= with the hub's id goes on where it stopped)"
    if not path.is_file():
        raise Broken(f"{path} does not exist: the weights are incomplete", again)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if (first + file.read(len(_GIT_LFS) - 8)).startswith(_GIT_LFS):
                raise Broken(f"{path} is a Git LFS pointer, not the file", "git lfs pull")
            file.seek(8)
            head = file.read(length) if len(first) == 8 and length <= min(size, _LARGEST_HEAD) else b""
    except OSError as error:
        raise Broken(f"{path} cannot be read ({error.strerror})", "give this user the right to read it") from error
    try:
        shapes, end = _parse(head)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Broken(f"{path} ({size:,} bytes) does not begin as a safetensors file does", again) from error
    if size != 8 + length + end:
        raise Broken(f"{path} has {size:,} bytes, and its head says {8 + length + end:,}: it is not whole", again)
    return Shard(path, size, shapes)


def _parse(head: bytes) -> tuple[dict[str, tuple[int, ...]], int]:
    """Shapes, and where the last tensor's bytes end."""
    tensors: dict[str, Any] = json.loads(head)
    tensors.pop("__metadata__", None)
    shapes = {name: tuple(map(int, each["shape"])) for name, each in tensors.items()}
    return shapes, max((int(each["data_offsets"][1]) for each in tensors.values()), default=0)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
