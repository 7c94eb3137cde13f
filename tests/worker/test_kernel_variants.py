"""Kernels are compiled for kinds of arguments. Those of random plans must all be among those of the rehearsal."""

import inspect
import itertools
from functools import partial

import numpy as np
import pytest
import torch

from bench.random_plans import RandomPlans
from services.common.config import ChosenWorkerConfig
from services.worker.boot import rehearsal
from services.worker.boot.common import make_cache, make_limits
from services.worker.described.registry import read_model_config
from services.worker.layers.expert_tiles import changes
from services.worker.layers.experts import Routes
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.kernels import LayerKernels, TorchKernels
from services.worker.layers.linear import Linear
from services.worker.models.decoder import DecoderModel
from services.worker.models.weights import load_dummy
from tests.worker.interpreter import DEVICE, INTERPRETED, needs_triton
from tests.worker.test_cuda_steps import CONFIG, device_without_streams

__all__ = ["device_without_streams"]

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED, reason="on a GPU bench.fuzz_worker counts compilations"),
    pytest.mark.usefixtures("device_without_streams"),
]

CONTEXT = 2048  # long enough that few rows are split
FLAGS = ChosenWorkerConfig(
    page_size=16, kv_cache_num_tokens=16 * 4096, max_tokens_per_forward=2048, max_seqs_per_forward=256
)
# Captured graphs launch what they launched under capture.
LARGEST_GRAPH = 16
BATCHES = 300


def variant(kernel, arguments: dict) -> tuple:
    """Return the key of the variant that Triton compiles: constants, types, and properties of the other arguments."""
    spared = set(kernel.kwargs.get("do_not_specialize") or ())
    unaligned = set(kernel.kwargs.get("do_not_specialize_on_alignment") or ())
    constants = {
        name for name, parameter in inspect.signature(kernel.fn).parameters.items() if "constexpr" in str(parameter)
    }
    kinds = []
    for name, value in arguments.items():
        if torch.is_tensor(value):
            aligned = value.data_ptr() % 16 == 0 or name in unaligned or name in spared
            kinds.append((name, str(value.dtype), aligned))
        elif isinstance(value, (int, np.integer)) and not isinstance(value, bool) and name not in constants:
            known = name in spared
            kinds.append((name, known or value == 1, known or value % 16 == 0))
        else:
            kinds.append((name, "float" if isinstance(value, float) and name not in constants else value))
    return (kernel.fn.__name__, *kinds)


@pytest.fixture
def launched(monkeypatch):
    """The variants that were launched; nothing is computed."""
    from triton.runtime.interpreter import InterpretedFunction

    found = set()

    def run(self, *args, grid, warmup, **kwargs):
        arguments = dict(zip(self.arg_names, args, strict=False)) | kwargs
        found.add(variant(self, arguments))
        if "token_ids" in arguments:  # looked up in the embedding
            arguments["token_ids"].zero_()

    monkeypatch.setattr(InterpretedFunction, "run", run)
    return found


def make_kernels() -> LayerKernels:
    """The operators of CUDA for experts, which are registered for this device alone."""
    from services.worker.layers import triton_experts, triton_routing

    class ExpertKernels(TorchKernels):
        def route(self, logits, router, chosen, correction, load=None):
            rules = router.scores, router.normalized, router.groups, router.chosen_groups, router.scale
            return Routes(*triton_routing.route(logits, correction, load, *rules, chosen))

        def mix(self, x, routes, weights, activation, onto=None):
            return triton_experts.mix_experts(x, *routes, *weights, activation)

    return ExpertKernels()


EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize(
    ("graphs", "pieces", "described", "dtype", "linear"),
    [
        (0, 0, CONFIG, torch.float32, Linear),
        pytest.param(LARGEST_GRAPH, 0, CONFIG, torch.float32, Linear, marks=pytest.mark.slow),
        (LARGEST_GRAPH, 1024, CONFIG, torch.float32, Linear),
        pytest.param(0, 0, CONFIG, torch.bfloat16, Linear, marks=pytest.mark.slow),
        pytest.param(LARGEST_GRAPH, 1024, CONFIG, torch.bfloat16, Linear, marks=pytest.mark.slow),
        (0, 0, EXPERTS, torch.bfloat16, Linear),
        pytest.param(LARGEST_GRAPH, 1024, EXPERTS, torch.bfloat16, Linear, marks=pytest.mark.slow),
        pytest.param(0, 0, EXPERTS, torch.float32, Linear, marks=pytest.mark.slow),
        pytest.param(0, 0, EXPERTS, torch.bfloat16, partial(GroupedLinear, bits=4), marks=pytest.mark.slow),
    ],
    ids=[
        "eager",
        "graphs",
        "pieces",
        "bf16",
        "pieces-bf16",
        "experts",
        "experts-pieces",
        "experts-float32",
        "experts-int4",
    ],
)
def test_random_plans_launch_no_kernel_that_the_rehearsal_did_not(launched, graphs, pieces, described, dtype, linear):
    from services.worker.attention.cuda import CudaAttention
    from services.worker.runner.cuda.runner import CudaRunner
    from services.worker.runner.cuda.state import DeviceState
    from services.worker.sampling.fused import FusedSampler

    config = read_model_config(described | {"max_position_embeddings": CONTEXT})
    model = DecoderModel(config, dtype, DEVICE, make_kernels(), linear)
    load_dummy(model, seed=1)
    cache = make_cache(FLAGS, model, FLAGS.page_count)
    limits = make_limits(FLAGS, model, FLAGS.page_count, hydragen=True)
    state = DeviceState.empty(limits, DEVICE)
    attention = CudaAttention(cache, 4, model.rotaries)
    sampler = FusedSampler(model.project, 96, DEVICE, cache.tokens, state.page_table)
    runner = CudaRunner(model, cache, attention, sampler, state, limits)
    # As boot_cuda does.
    [item] = {layer.mlp.gate_up.itemsize for layer in model.layers} if model.local.experts else {dtype.itemsize}
    of_experts = (changes(len(each.local), each.chosen, item) for each in model.local.experts)
    around = (rehearsal.around(limits, tokens, 8) for tokens in set(itertools.chain(*of_experts)))
    for plans in itertools.chain(rehearsal.every_kind(limits), *around):
        runner.reset()
        for plan in plans:
            runner.run(plan)
    if graphs:
        runner.capture(graphs, pieces=pieces, has_experts=bool(model.local.experts))
    for plans in rehearsal.largest(limits):
        runner.reset()
        for plan in plans:
            runner.run(plan)
    runner.reset()
    rehearsed = set(launched)
    assert {"_route", "_count", "_place", "_products", "_sum"} <= {
        name for name, *_ in launched
    } or not model.local.experts
    random = RandomPlans(limits, seed=1)
    for _ in range(BATCHES):
        plan, _ = random.next()
        runner.run(plan)
    assert launched == rehearsed
