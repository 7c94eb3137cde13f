"""Steps with chunks as one graph: which steps it serves, and that its tokens are those of pieces."""

import numpy as np
import pytest

from services.worker.attention.mixed import MixedInputs
from services.worker.attention.spans import TILE_FIELDS
from tests.worker.driver import admission, batch
from tests.worker.interpreter import DEVICE, needs_triton
from tests.worker.no_streams import device_without_streams
from tests.worker.test_cuda_steps import PAGE, config, cuda, grouped_tokens, plain, prepare_groups

__all__ = ["config", "cuda", "device_without_streams", "plain"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]


@pytest.fixture
def launched(monkeypatch) -> list[tuple[int, bool]]:
    """For each step that no decode graph serves: its padded tokens, and whether it was one graph."""
    from services.worker.runner.cuda.pieces import MixedBlock, StepPieces

    seen, run = [], StepPieces.run

    def watched(self, size, entering, positions, attention, keep):
        seen.append((size, isinstance(attention, MixedBlock)))
        return run(self, size, entering, positions, attention, keep)

    monkeypatch.setattr(StepPieces, "run", watched)
    return seen


def tokens_of(driver) -> list[list[int]]:
    """Return the tokens of steps with one to three chunks beside rows of one token, then of a step without chunks."""
    driver.reset()
    lengths = 9, 5, 13, 3
    admissions = [
        admission(slot, range(20 + slot, 20 + slot + length), range(8 * slot, 8 * slot + 8), temperature=0.5 * slot)
        for slot, length in enumerate(lengths)
    ]
    steps = [
        driver.run(admissions=(admissions[0],), batch=batch([0], [9])),
        driver.run(admissions=(admissions[1], admissions[2]), batch=batch([1, 0, 2], [5, 1, 6])),
        driver.run(admissions=(admissions[3],), batch=batch([0, 2, 1, 3], [1, 7, 1, 2])),
        driver.run(batch=batch([3, 1, 2, 0])),
        driver.run(batch=batch([1, 0])),
    ]
    return [step.sampled.token_ids.tolist() for step in steps]


def test_steps_with_chunks_are_one_graph(plain, cuda, launched):
    assert tokens_of(cuda(8, pieces=96)) == tokens_of(plain)
    assert launched == [(16, True)] * 3


def test_with_a_backend_that_plans_on_the_host_they_are_pieces(plain, cuda, launched, monkeypatch):
    from services.worker.attention.cuda import CudaAttention

    monkeypatch.setattr(CudaAttention, "captures_chunks", False)
    assert tokens_of(cuda(8, pieces=96)) == tokens_of(plain)
    assert launched == [(16, False)] * 3


@pytest.mark.slow
def test_steps_with_groups_and_with_long_contexts_are_pieces(plain, cuda, launched, monkeypatch):
    from services.worker.attention.cuda import CudaAttention

    prepare_groups(monkeypatch)
    assert grouped_tokens(cuda(20, pieces=32), grouped=True) == grouped_tokens(plain, grouped=False)
    assert [mixed for _, mixed in launched] == [True, False]
    launched.clear()
    monkeypatch.setattr(CudaAttention, "context_stages", lambda self: [2 * PAGE + 1, 256])
    assert tokens_of(cuda(8, pieces=96)) == tokens_of(plain)
    assert [mixed for _, mixed in launched] == [True, False, False]


@pytest.mark.slow
def test_a_step_with_more_tiles_than_the_graph_is_pieces(plain, cuda, launched, monkeypatch):
    from services.worker.attention import mixed

    monkeypatch.setattr(mixed, "_CHUNKS", 0)
    monkeypatch.setattr(mixed, "_CHUNK_TOKENS", 32)  # a graph of 16 tokens has one tile
    assert tokens_of(cuda(8, pieces=96)) == tokens_of(plain)
    assert launched == [(16, True), (16, False), (16, False)]


@pytest.mark.slow
def test_several_programs_for_a_decode_row_leave_the_rows_of_chunks(plain, cuda, launched, monkeypatch):
    from services.worker.attention import cuda as attention

    monkeypatch.setattr(attention, "choose_splits", lambda *_: 3)
    assert tokens_of(cuda(8, pieces=96)) == tokens_of(plain)
    assert launched == [(16, True)] * 3


def test_a_block_that_has_too_many_tiles_is_refused():
    assert len(MixedInputs(1024, 32, DEVICE).tiles) == 32 + 64
    inputs = MixedInputs(32, 16, DEVICE)
    slots = np.arange(20, dtype=np.int32)
    tiles = np.ones((18, TILE_FIELDS), np.int32)
    block = inputs.block(slots, 3, tiles)
    assert inputs.block(slots, 3, np.ones((19, TILE_FIELDS), np.int32)) is None
    inputs.set(inputs.token_slots.new_tensor(block))
    assert inputs.token_slots.tolist() == [*range(20), *[-1] * 12]
    assert inputs.decode_slots.tolist() == [0, 1, 2, *[-1] * 29]
    assert inputs.tiles.tolist() == tiles.tolist()
    inputs.set(inputs.token_slots.new_tensor(inputs.block(slots[:2], 0, tiles[:1])))
    assert inputs.decode_slots.tolist() == [-1] * 32
    assert inputs.tiles[1:].any().item() is False
