"""Whole deployments on a GPU, held against transformers in float32 on the CPU. Skipped where there is none."""

import pytest
import torch
import transformers

from bench.server import serve
from services.common.model.files import BUILTIN, BUILTIN_MOE
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tests.e2e.samples import agreement, generate_all, random_prompt, request
from tests.foreign_models import make_foreign_checkpoint
from tests.gateway.deployment import eventually_async

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

TOKENS = 24
CHECKPOINTS = {
    "llama": {"architecture": "llama", "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "tied": True},
    "aligned": {"architecture": "llama", "vocab_size": 416},  # sizes that fp8 products take
}
# Largest and mean difference of a log-probability in nats, and the least share of first choices: of random weights,
# whose choices are close to each other. In float32 a graph, a compiler or a group may change the last bits only.
BOUNDS = {
    "float32": (1e-4, 1e-5, 0.99),
    "float16": (0.1, 0.02, 0.96),
    "bfloat16": (0.25, 0.05, 0.93),
    "fp8": (2.0, 0.35, 0.7),
    "int8": (1.0, 0.1, 0.9),
    "int4": (6.0, 0.9, 0.6),
    "builtin-moe": (6.0, 0.15, 0.9),  # rounding may change a choice of experts
}
# By default a server takes all of the memory, and nothing is left for a second one.
CACHE = {"kv_cache_num_tokens": 128 * 1024}
COMPILED = {"torch_compile": "T", "use_cudagraphs": "T", "fail_on_recompile": "T"}
# What the scheduler takes for worth a group: with fewer samples of the prompt below, it is right to make none.
HYDRAGEN = {"use_hydragen": "T", "hydragen_min_group_size": 2, "hydragen_min_prefix_len": 16}
SAMPLES, SHARED = 160, 600


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory):
    made = {"builtin": BUILTIN, "builtin-moe": BUILTIN_MOE}

    def find(name: str):
        if name not in made:
            directory = tmp_path_factory.mktemp("model")
            if name in CHECKPOINTS:
                made[name] = make_checkpoint(directory, **CHECKPOINTS[name])
            else:  # through transformers
                made[name] = make_foreign_checkpoint(directory, name)
        return made[name]

    return find


def reference_of(directory) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


# Every kind of start once, on models and dtypes in turn; tests/worker/test_cuda_runner.py runs the others.
@pytest.mark.parametrize(
    ("model", "dtype", "flags"),
    [
        ("qwen2", "bfloat16", {}),
        ("llama", "float32", {"use_cudagraphs": "T"}),
        ("builtin", "bfloat16", COMPILED),
        ("qwen3", "float32", COMPILED),
        ("llama", "float16", COMPILED),
        ("builtin", "bfloat16", {"quantization": "fp8"}),
        ("aligned", "bfloat16", {"quantization": "fp8"} | COMPILED),
        ("builtin", "bfloat16", {"quantization": "int8"}),
        ("builtin", "bfloat16", {"quantization": "int4"} | COMPILED),
        ("builtin-moe", "bfloat16", {"quantization": "int8"}),
        ("builtin-moe", "float16", {"quantization": "int8"} | COMPILED),
        ("cohere2", "bfloat16", {"use_cudagraphs": "T", "piecewise_cudagraph_max_tokens": 128}),
        ("deepseek_v2", "float32", {}),
        ("gpt2", "bfloat16", {"use_cudagraphs": "T"}),
        ("jetmoe", "float32", {}),  # its code waits for the device, so there are no graphs
        ("qwen2_moe", "float32", {"use_cudagraphs": "T"}),
    ],
)
async def test_log_probabilities_agree_with_transformers(directory_of, model, dtype, flags):
    directory = directory_of(model)
    reference = reference_of(directory)
    lengths = [1, 16, 17, 200, *range(3, 60)]
    prompts = [random_prompt(length, reference.config.vocab_size) for length in lengths]
    with serve(model=directory, device="cuda", dtype=dtype, max_tokens_per_forward=256, **CACHE, **flags) as server:
        alone = [(await generate_all(server.grpc_address, [request(each, TOKENS)]))[0][0] for each in prompts[:4]]
        together = await generate_all(server.grpc_address, [request(each, TOKENS) for each in prompts])
    answers = list(zip(prompts[:4], alone, strict=True))
    answers += [(prompt, samples[0]) for prompt, samples in zip(prompts, together, strict=True)]
    found = agreement(reference, answers)
    found.check(*BOUNDS[model if model in BOUNDS else flags.get("quantization", dtype)])


@pytest.mark.parametrize(("model", "dtype"), [("builtin", "bfloat16"), ("qwen3", "float32"), ("llama", "bfloat16")])
async def test_samples_in_a_group_agree_with_transformers_and_with_samples_in_none(directory_of, model, dtype):
    directory = directory_of(model)
    reference = reference_of(directory)
    prompt = random_prompt(SHARED, reference.config.vocab_size)
    drawn = request(prompt, TOKENS, n=SAMPLES, temperature=0.8, seed=1)
    greedy = request(prompt, TOKENS, n=SAMPLES)
    with serve(model=directory, device="cuda", dtype=dtype, **CACHE, **HYDRAGEN) as server:
        [samples], [grouped] = [await generate_all(server.grpc_address, [asked]) for asked in (drawn, greedy)]
        # Most rows of both requests. The worker reports the metric only every 0.2 s.
        await eventually_async(lambda: server.metric("toka_hydragen_rows_total") >= SAMPLES * TOKENS)
    assert len({tuple(sample.tokens) for sample in samples}) > SAMPLES // 2  # draws of their own
    largest, mean, _ = BOUNDS[dtype]
    # No share of first choices: the greedy samples are one answer of 24 tokens, 160 times.
    for answers in (samples, grouped):
        agreement(reference, [(prompt, sample) for sample in answers]).check(largest, mean)

    with serve(model=directory, device="cuda", dtype=dtype, **CACHE, use_hydragen="F") as server:
        single = (await generate_all(server.grpc_address, [greedy]))[0]
    # Both round once, to other sides: as far apart as either may be from the reference, on average half of that.
    differences = [
        abs(mine - theirs)
        for one, other in zip(grouped, single, strict=True)
        for mine, theirs in list(zip(one.logprobs, other.logprobs, strict=True))[: _same(one.tokens, other.tokens)]
    ]
    assert len(differences) >= SAMPLES * TOKENS * 0.5
    assert max(differences) <= largest
    assert sum(differences) / len(differences) <= mean


def _same(one: list[int], other: list[int]) -> int:
    """Tokens before the first that differs."""
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if len({*pair}) > 1), len(one))


async def test_a_seed_draws_the_same_tokens_alone_and_among_200_others():
    """In float32, where a batch's size changes the last bits only: graphs of several sizes, and steps beyond them."""
    seeded = [
        request(random_prompt(length, 2048), 40, temperature=temperature, seed=seed)
        for length, temperature, seed in ((30, 0.8, 7), (300, 1.5, 2**64 - 1))
    ]
    others = [
        request(random_prompt(5 + index % 90, 2048, index), 30 + index % 20, temperature=1.0) for index in range(200)
    ]
    flags = {"use_cudagraphs": "T", "cudagraph_max_size": 64, "max_seqs_per_forward": 256}
    with serve(device="cuda", dtype="float32", **CACHE, **flags) as server:
        alone = [(await generate_all(server.grpc_address, [each]))[0][0] for each in seeded]
        crowd = await generate_all(server.grpc_address, [*others[:100], *seeded, *others[100:]])
    for mine, [theirs] in zip(alone, crowd[100:102], strict=True):
        assert mine.tokens == theirs.tokens
        assert max(abs(a - b) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)) <= 1e-4
