"""Checkpoints whose weights stay quantized on a GPU: log-probabilities agree with the exact values of the weights."""

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers

from bench.server import serve
from tests import quantized_files as files
from tests.checkpoints import make_checkpoint
from tests.e2e.samples import Agreement, agreement, generate_all, random_prompt, request
from tests.gguf_files import write_quantized_gguf
from tests.quantized_files import Store, compressed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

TOKENS = 24
PROMPTS = [random_prompt(length, 400) for length in (1, 9, 17, 33, 64, 130, 300, 700)]
# Also with two ranks, every part of a projection has whole blocks of 128 x 128.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 416,
}
# Largest and mean difference of a log-probability in nats, and the least share of first choices. Weights have the same
# values in all forms. With fp8, the inputs of products are rounded to fp8 too. Rounding may change a choice of experts.
BOUNDS = {"none": (2.0, 0.06, 0.9), "experts": (6.0, 0.12, 0.9), "grouped": (2.0, 0.06, 0.9), "fp8": (6.0, 0.35, 0.7)}
# A server takes all of the memory by default, and tests run at the same time.
FLAGS = {"device": "cuda", "kv_cache_num_tokens": 32 * 1024, "max_seqs_per_forward": 64, "max_tokens_per_forward": 2048}

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
ROWS = compressed("float-quantized", {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"})
GROUPS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
CHANNEL = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def gptq(size: int, bits: int = 4, *, order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": order, "sym": False}


def awq(size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}


@dataclass(frozen=True)
class Case:
    """A way to store a model, the settings that describe it, and the bounds of its differences."""

    store: Store
    settings: dict[str, Any]
    bounds: str
    architecture: str = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    chosen: re.Pattern[str] = files.LINEAR


EXPERTS = {"moe_intermediate_size": 256}
CASES = {
    "fp8-tensor": Case(files.fp8(0, 0, name=".weight_scale", shape=()), FP8, "fp8"),
    "fp8-row": Case(files.fp8(1, 0, name=".weight_scale"), ROWS, "fp8", "qwen3"),
    "fp8-blocks": Case(files.fp8(128, 128), BLOCKS, "fp8"),
    "fp8-row-experts": Case(files.fp8(1, 0, name=".weight_scale"), ROWS, "fp8", "qwen3_moe", EXPERTS),
    "fp8-blocks-experts": Case(files.fp8(128, 128), BLOCKS, "fp8", "qwen3_moe", EXPERTS),
    "gptq-128": Case(files.gptq(128), gptq(128), "grouped", "qwen2"),
    "gptq-order": Case(files.gptq(128, order=True), gptq(128, order=True), "grouped", "qwen2"),
    "gptq-rows": Case(files.gptq(-1), gptq(-1), "grouped"),
    "gptq-8-bits": Case(files.gptq(32, bits=8), gptq(32, bits=8), "grouped"),
    "awq-128": Case(files.awq(128), awq(128), "grouped"),
    "int4-groups": Case(files.pack_quantized(32), compressed("pack-quantized", GROUPS), "grouped", "qwen3"),
    "int8-row": Case(files.int8(-1), compressed("int-quantized", CHANNEL), "grouped"),
    "gptq-128-experts": Case(files.gptq(128), gptq(128), "experts", "qwen3_moe", EXPERTS),
    "awq-32-experts": Case(files.awq(32), awq(32), "experts", "qwen3_moe", EXPERTS),
    "int8-row-experts": Case(files.int8(-1), compressed("int-quantized", CHANNEL), "experts", "qwen3_moe", EXPERTS),
    "mxfp4-experts": Case(
        files.mxfp4, {"quant_method": "mxfp4"}, "experts", "gpt_oss", chosen=re.compile(r".*\.experts\.\w+_proj$")
    ),
}

# Ways of which ranks have shares.
RANKED = (
    "fp8-row",
    "fp8-blocks",
    "fp8-blocks-experts",
    "gptq-rows",
    "awq-128",
    "int8-row",
    "gptq-128-experts",
    "mxfp4-experts",
)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """``quantized(name)``: the directory of a quantized checkpoint, and that of one with its values."""

    def make(name: str):
        case, place = CASES[name], tmp_path_factory.mktemp("quantized")
        source = make_checkpoint(place / "source", case.architecture, **SIZES | case.sizes)
        return files.write_quantized(source, place / "model", case.store, case.settings, chosen=case.chosen)

    return make


async def compare(directory, exact, **flags) -> tuple[str, Agreement]:
    """Serve ``directory``. Return its value of the flag ``quantization``, and its agreement with ``exact``."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32).eval()
    with serve(model=directory, **FLAGS | flags) as server:
        # Steps of few rows, then steps of many rows.
        alone = [(await generate_all(server.grpc_address, [request(each, TOKENS)]))[0] for each in PROMPTS[:2]]
        together = await generate_all(server.grpc_address, [request(each, TOKENS) for each in PROMPTS])
        log = server.log
    answers = [(prompt, sample) for prompt, [sample] in zip(PROMPTS[:2] + PROMPTS, alone + together, strict=True)]
    settings = next(line for line in re.sub(r"\x1b\[[0-9;]*m", "", log).splitlines() if "settings" in line)
    return re.search(r"\"?quantization\"?[=:] ?'?\"?(\w+)", settings)[1], agreement(reference, answers)


@pytest.mark.parametrize("name", CASES)
async def test_weights_stay_quantized_and_keep_their_values(name, quantized):
    directory, exact = quantized(name)
    chosen, found = await compare(directory, exact)
    found.check(*BOUNDS[CASES[name].bounds])
    assert chosen == "checkpoint"
    chosen, found = await compare(directory, exact, quantization="none", use_cudagraphs="F")
    found.check(*BOUNDS["experts" if "experts" in name else "none"])
    assert chosen == "none"


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *((kind, "llama") for kind in ("Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K")),
        ("Q4_K", "qwen3_moe"),
        ("Q8_0", "qwen3_moe"),
    ],
)
async def test_integers_of_gguf_files_stay_quantized(kind, architecture, tmp_path):
    sizes = SIZES | (EXPERTS if architecture == "qwen3_moe" else {})
    source = make_checkpoint(tmp_path / "source", architecture, **sizes)
    chosen, found = await compare(*write_quantized_gguf(source, tmp_path / "model.gguf", kind))
    found.check(*BOUNDS["experts" if architecture == "qwen3_moe" else "grouped"])
    assert chosen == "checkpoint"


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize("flags", [{"tp_size": 2}, {"pp_size": 2}], ids=["tp", "pp"])
async def test_ranks_keep_their_shares_quantized(name, flags, quantized):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    chosen, found = await compare(*quantized(name), **flags)
    found.check(*BOUNDS[CASES[name].bounds])
    assert chosen == "checkpoint"
