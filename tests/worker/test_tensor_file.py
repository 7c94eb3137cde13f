"""Safetensors files are written from chunks of any size in any order, and wrong chunks are refused."""

import errno
import os
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import StoredTensor, read_shard
from services.worker.engine.tensor_file import Coverage, TensorFile

DTYPES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16", torch.float64: "F64"}


def content(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def described(tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    return {name: StoredTensor(DTYPES[each.dtype], tuple(each.shape)) for name, each in tensors.items()}


def write(path: Path, tensors: dict[str, torch.Tensor], chunks: list[tuple[str, int, int]]) -> None:
    with TensorFile(path, described(tensors)) as file:
        for name, start, end in chunks:
            file.write(name, start, content(tensors[name])[start:end])
        file.check()


@st.composite
def plans(draw) -> tuple[dict[str, torch.Tensor], list[tuple[str, int, int]]]:
    """Draw tensors, and their chunks (name, first byte, end) in the order in which they are sent."""
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from([*DTYPES])), draw(st.lists(st.integers(0, 6), max_size=3))
        tensors[f"t{number}"] = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype) + number
    chunks = []
    for name, each in tensors.items():
        size = each.nbytes
        cuts = draw(st.sets(st.integers(1, size - 1), max_size=8)) if size > 1 else set()
        edges = sorted({0, size, *cuts})
        chunks += [(name, start, end) for start, end in pairwise(edges)]
    return tensors, draw(st.permutations(chunks))


@given(plans())
def test_any_chunks_in_any_order_give_the_file(tmp_path_factory, plan):
    tensors, chunks = plan
    path = tmp_path_factory.mktemp("upload") / "model.safetensors"
    write(path, tensors, chunks)
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], each) and read[name].dtype == each.dtype for name, each in tensors.items())
    assert read_shard(path).tensors == described(tensors)


@given(plans(), st.data())
def test_a_chunk_that_is_left_out_or_sent_twice_is_an_error_that_names_its_tensor(tmp_path_factory, plan, data):
    tensors, chunks = plan
    if not chunks:
        return
    wrong = data.draw(st.sampled_from(chunks))
    twice = data.draw(st.booleans())
    sent = [*chunks, wrong] if twice else [each for each in chunks if each != wrong]
    with pytest.raises(InvalidRequest, match=f"^{wrong[0]}: "):
        write(tmp_path_factory.mktemp("upload") / "model.safetensors", tensors, sent)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 10)), max_size=30))
def test_ranges_are_those_of_a_set_of_bytes(ranges):
    coverage, known = Coverage(), set()
    for start, length in ranges:
        new = set(range(start, start + length))
        assert coverage.add(start, start + length) is not bool(new & known)
        known |= new if not new & known else set()
        missing = next(at for at in range(100) if at not in known)
        assert coverage.first_missing == missing
        assert coverage.ranges == sum(at - 1 not in known for at in known)


@pytest.mark.parametrize(
    ("name", "offset", "size", "field"),
    [
        ("other", 0, 4, "chunk.name"),
        ("t", 0, 0, "chunk.data"),
        ("t", 0, 13, "chunk.offset"),
        ("t", 12, 1, "chunk.offset"),
        ("t", 2**63, 4, "chunk.offset"),
    ],
)
def test_a_chunk_outside_of_the_header_is_refused(tmp_path, name, offset, size, field):
    file = TensorFile(tmp_path / "file", {"t": StoredTensor("F32", (3,))})
    with file, pytest.raises(InvalidRequest, match=name) as refused:
        file.write(name, offset, b"x" * size)
    assert refused.value.field == field


def test_chunks_that_leave_too_many_gaps_are_refused(tmp_path):
    """Each gap takes memory, and a model has billions of bytes."""
    with TensorFile(tmp_path / "file", {"t": StoredTensor("F32", (2**20,))}) as file:
        for gaps in range(65_536):
            file.write("t", 2 * gaps, b"x")
        with pytest.raises(InvalidRequest, match="gaps"):
            file.write("t", 2**21, b"x")


def test_no_file_is_overwritten(tmp_path):
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(FileExistsError):
        TensorFile(tmp_path / "file", {})
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_whose_header_cannot_be_written_is_closed(tmp_path, monkeypatch):
    closed = []

    def write(file, data, at) -> int:
        raise OSError(errno.ENOSPC, "no space is left")

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "close", closed.append)
    with pytest.raises(OSError, match="no space"):
        TensorFile(tmp_path / "file", {})
    monkeypatch.undo()
    [file] = closed
    os.close(file)
