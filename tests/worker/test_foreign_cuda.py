"""Models that transformers computes, with the runner and the kernels for CUDA: on the GPU if there is one, else in
Triton's interpreter, with graphs that launch again."""

import numpy as np
import pytest
import torch

from services.common.config import ChosenWorkerConfig, WorkerConfig
from services.common.model.json_object import read_json
from services.worker.boot.common import boot, make_cache, make_limits
from services.worker.described.foreign import read_foreign
from services.worker.described.heads import laid_out
from services.worker.described.ranks import ALONE
from tests.foreign_models import make_foreign_checkpoint
from tests.worker.driver import Driver, admission, batch
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.no_streams import device_without_streams

__all__ = ["device_without_streams"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]

PAGE, TOKENS = 8, 4
FLAGS = ChosenWorkerConfig(
    page_size=PAGE, kv_cache_num_tokens=PAGE * 64, max_tokens_per_forward=48, max_seqs_per_forward=16
)
ARCHITECTURES = {
    "bart": {},  # positions that the model counts
    "bloom": {"seq_length": 256},  # attention in its own code, with a bias by position. A short context has few graphs
    "cohere2": {},  # windows
    "deepseek_v2": {},  # heads of 24 elements, values of 12
    "gpt2": {},  # positions in the embedding
    "llama4_text": {"attention_chunk_size": 6, "num_hidden_layers": 2, "no_rope_layers": [1, 0]},  # chunks
    "mimo_v2_flash": {"num_hidden_layers": 2},  # layers with different heads
    "qwen2_moe": {"tie_word_embeddings": True},  # experts
    "vaultgemma": {},  # a cap of the scores
}


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    return make_foreign_checkpoint(tmp_path_factory.mktemp("foreign"), request.param, **ARCHITECTURES[request.param])


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(6, 400, tokens).tolist()


def on_cuda(directory, graphs: int, pieces: int) -> Driver:
    from services.worker.attention.cuda import CudaAttention
    from services.worker.models.foreign.source import ForeignSource
    from services.worker.runner.cuda.runner import CudaRunner
    from services.worker.runner.cuda.state import DeviceState
    from services.worker.sampling.fused import FusedSampler

    raw = read_json(directory / "config.json")
    source = ForeignSource(directory, raw, read_foreign(raw, raw["architectures"][0]), torch.float32)
    source.check()
    described = laid_out(source.described, "cuda")
    layers = range(len(described.layers))
    model = source.make(FLAGS, described, torch.float32, DEVICE, ALONE, layers)
    source.fill(model, dummy=False)
    cache = make_cache(FLAGS, model, FLAGS.page_count)
    limits = make_limits(FLAGS, model, FLAGS.page_count, hydragen=True)
    state = DeviceState.empty(limits, DEVICE)
    attention = CudaAttention(
        cache, described.heads, model.rotaries, dtype=model.dtype, layers=model.attention_layers()
    )
    sampler = FusedSampler(model.project, described.vocab_size, DEVICE, cache.tokens, state.page_table)
    runner = CudaRunner(model, cache, attention, sampler, state, limits)
    if graphs:
        runner.capture(graphs, pieces=pieces)
    return Driver(runner)


# The interpreter takes a second for a step.
@pytest.mark.parametrize(
    "directory",
    ["cohere2", *(pytest.param(each, marks=pytest.mark.slow) for each in ARCHITECTURES if each != "cohere2")],
    indirect=True,
)
@pytest.mark.parametrize(("graphs", "pieces"), [(0, 0), pytest.param(8, 32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("count", [4, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_tokens_are_those_of_the_runner_for_cpus(directory, count, graphs, pieces, monkeypatch):
    """In float32, from a prompt in chunks, a short one beside it, and a cached prefix."""
    from services.worker.attention.cuda import CudaAttention

    if INTERPRETED:  # graphs with attention take minutes, because each has tiles for many chunks
        monkeypatch.setattr(CudaAttention, "captures_chunks", False)
    flags = FLAGS.model_dump(include={"page_size", "kv_cache_num_tokens", "max_tokens_per_forward"})
    plain = Driver(boot(WorkerConfig(model=str(directory), device="cpu", max_seqs_per_forward=16, **flags)).runner)
    prompts = [prompt_of(27), prompt_of(3, 1)]
    expected = plain.generate(prompts, count, chunk=11)
    driver = on_cuda(directory, graphs, pieces)
    assert driver.generate(prompts, count, chunk=11) == expected
    driver.run(admissions=(admission(2, prompts[0], [0, 1, 2, 40, 41], cached_tokens=24),), batch=batch([2], [3]))
    while len(driver.tokens[2]) < count:
        driver.run(batch=batch([2], [1]))
    assert driver.tokens[2] == expected[0]
