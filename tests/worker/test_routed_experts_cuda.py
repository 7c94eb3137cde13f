"""Experts of tokens from the GPU's runner are those of the CPU's runner, with and without graphs."""

import numpy as np
import pytest
import torch

from services.common.config import ChosenWorkerConfig
from services.worker.boot.common import make_cache, make_limits, make_recorder
from services.worker.layers.factory import make_kernels
from tests.worker.driver import Driver, admission, batch
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.no_streams import device_without_streams
from tests.worker.routed import Received, asking
from tests.worker.test_cuda_steps import CONFIG, make_model

__all__ = ["device_without_streams"]

pytestmark = [needs_triton, pytest.mark.usefixtures("triton_ready", "device_without_streams")]

PAGE = 4
EXPERTS = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2}
MIXTURE = CONFIG | EXPERTS | {"moe_intermediate_size": 16, "norm_topk_prob": True}
FLAGS = ChosenWorkerConfig(
    page_size=PAGE,
    kv_cache_num_tokens=64 * PAGE,
    max_tokens_per_forward=64,
    max_seqs_per_forward=16,
    return_routed_experts=True,
)
LONG, SHORT, QUIET = (
    [(7 * index + first) % 96 for index in range(count)] for first, count in ((1, 14), (5, 3), (9, 6))
)


def on_cpu() -> Driver:
    from services.worker.attention.plain import PlainAttention
    from services.worker.runner.runner import StepRunner
    from services.worker.runner.shards import ShardThreads

    model = make_model(torch.device("cpu"), MIXTURE)
    cache, limits = make_cache(FLAGS, model, FLAGS.page_count), make_limits(FLAGS, model, FLAGS.page_count)
    attention, recorder = PlainAttention(cache, model.attention_layers()), make_recorder(model, cache, limits)
    return Driver(StepRunner(model, cache, attention, limits, ShardThreads(1), recorder=recorder))


def on_gpu(graphs: int, pieces: int) -> Driver:
    from services.worker.attention.cuda import CudaAttention
    from services.worker.runner.cuda.runner import CudaRunner
    from services.worker.runner.cuda.state import DeviceState
    from services.worker.sampling.fused import FusedSampler

    kernels = None if INTERPRETED else make_kernels(DEVICE, torch.float32)  # a graph holds no plain mixture
    model = make_model(DEVICE, MIXTURE, kernels)
    cache, limits = make_cache(FLAGS, model, FLAGS.page_count), make_limits(FLAGS, model, FLAGS.page_count)
    state = DeviceState.empty(limits, DEVICE)
    attention = CudaAttention(cache, 4, model.rotaries, dtype=model.dtype, layers=model.attention_layers())
    sampler = FusedSampler(model.project, 96, DEVICE, cache.tokens, state.page_table)
    recorder = make_recorder(model, cache, limits, 8)
    runner = CudaRunner(model, cache, attention, sampler, state, limits, recorder=recorder)
    if graphs:
        runner.capture(graphs, pieces=pieces, has_experts=True)
    return Driver(runner)


def follow(driver: Driver) -> list[np.ndarray]:
    """Run chunks, decode steps, a cached prefix and a copied page. Return the experts of all sequences that ask."""
    driver.reset()
    received, found = Received(2, 2), []

    def run(**parts) -> None:
        output = received.take(driver.run(**parts))
        found.append(output.sampled.token_ids)

    run(admissions=(admission(1, QUIET, [8, 9, 14]), asking(0, LONG, range(5))), batch=batch([1, 0], [6, 5]))
    run(admissions=(asking(2, SHORT, [10, 11]),), batch=batch([0, 1, 2], [6, 1, 3]))
    run(batch=batch([2, 0, 1], [1, 3, 1]))
    run(batch=batch([0, 1, 2]))
    run(batch=batch([0]))
    cached = len(QUIET) - 1
    again = asking(3, QUIET, [8, 12, 15], cached_tokens=cached), asking(4, QUIET, [8, 13, 16], 5, cached_tokens=cached)
    copies = {"copy_sources": [9, 9], "copy_targets": [12, 13]}
    run(releases=[2], admissions=again, batch=batch([4, 0, 3]), **copies)
    run(batch=batch([4, 3, 0]))
    assert 1 not in received
    return found + [received.of(slot, start) for slot, start in ((0, 0), (2, 0), (3, 0), (4, 5))]


@pytest.mark.parametrize(
    ("graphs", "pieces"),
    [(0, 0), (8, 0), pytest.param(8, 32, marks=pytest.mark.slow)],
    ids=["eager", "graphs", "pieces"],
)
def test_the_gpus_runner_returns_the_experts_of_the_cpus_runner(graphs, pieces):
    for expected, found in zip(follow(on_cpu()), follow(on_gpu(graphs, pieces)), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_padding_does_not_write_to_any_page():
    driver = on_gpu(0, 0)
    kept = driver.runner.cache.routed_experts
    kept.fill_(9)
    driver.run(admissions=(asking(0, [1, 2, 3], [5]),), batch=batch([0], [3]))
    touched = (kept[:-1] != 9).any(dim=(2, 3)).nonzero().tolist()
    assert touched == [[5, 0], [5, 1], [5, 2]]
