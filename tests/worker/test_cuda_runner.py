"""The runner on a GPU, in this process: every architecture, dtype and way to launch, and the CPU's own answers."""

import gc

import pytest
import torch

from bench.problems import read_problems
from bench.quantization_error import load, logprobs_of
from services.common.config import WorkerConfig
from services.common.model import files as model_files
from services.common.text.tokenizer import Tokenizer
from services.worker.boot.common import boot
from services.worker.boot.compilation import compilations
from tests.checkpoints import LLAMA3_ROPE
from tests.e2e.samples import Sample, agreement, random_prompt
from tests.worker.driver import Driver

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(400),  # a first start compiles
]

TOKENS, PROBLEMS = 24, 50
CHECKPOINTS = {
    "llama": {"architecture": "llama", "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "tied": True},
    "mistral": {"architecture": "mistral", "sliding_window": 50},
    "windows": {"architecture": "qwen2", "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
    "yarn": {
        "architecture": "qwen3",
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
    },
}
# As in tests/e2e/test_cuda.py.
BOUNDS = {"float32": (1e-4, 1e-5, 0.99), "float16": (0.1, 0.02, 0.96), "bfloat16": (0.25, 0.05, 0.93)}


@pytest.fixture
def driver_for():
    """``driver_for(model, flag=value, ...)``; nothing of it is left on the device afterwards."""
    made = []

    def get(model, **flags) -> Driver:
        sizes = {"kv_cache_num_tokens": 16 * 1024, "max_tokens_per_forward": 256, "max_seqs_per_forward": 64}
        made.append(Driver(boot(WorkerConfig(model=str(model), **sizes | flags)).runner))
        return made[-1]

    yield get
    for driver in made:
        if hasattr(driver.runner, "close"):
            driver.runner.close()
        driver.runner = None
    made.clear()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("pieces", [0, 128, 256])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["builtin", "llama", "qwen2", "qwen3"])
def test_log_probabilities_agree_with_transformers(checkpoint, reference, driver_for, name, dtype, compiled, pieces):
    check_agreement(checkpoint, reference, driver_for, name, dtype, compiled, pieces)


@pytest.mark.parametrize(
    ("name", "dtype", "compiled", "pieces"),
    [
        ("mistral", "bfloat16", False, 0),
        ("mistral", "float32", True, 256),
        ("windows", "bfloat16", True, 128),
        ("windows", "float32", False, 0),
        ("yarn", "bfloat16", True, 0),
        ("llama", "float16", True, 128),
        ("builtin", "float16", False, 0),
    ],
)
def test_windows_scaled_positions_and_float16_agree_with_transformers(
    checkpoint, reference, driver_for, name, dtype, compiled, pieces
):
    check_agreement(checkpoint, reference, driver_for, name, dtype, compiled, pieces)


def check_agreement(checkpoint, reference, driver_for, name, dtype, compiled, pieces) -> None:
    """Three rows are a graph, twelve are none; prompts are cut into chunks, and run beside rows that decode: kernel by
    kernel, or in pieces, or either as it is large."""
    directory = model_files.BUILTIN if name == "builtin" else checkpoint(**CHECKPOINTS[name])
    expected = reference(directory)
    flags = {"dtype": dtype, "torch_compile": compiled, "piecewise_cudagraph_max_tokens": pieces}
    driver = driver_for(directory, device="cuda", use_cudagraphs=True, cudagraph_max_size=8, **flags)
    answers = []
    for lengths in ((1, 17, 200), range(1, 240, 20)):
        driver.reset()
        prompts = [random_prompt(length, expected.config.vocab_size) for length in lengths]
        driver.generate(prompts, TOKENS, chunk=96, logprobs=True)
        answers += [(prompt, Sample(driver.tokens[slot], driver.logprobs[slot])) for slot, prompt in enumerate(prompts)]
    agreement(expected, answers).check(*BOUNDS[dtype])


def test_the_model_is_compiled_once_for_all_tokens_and_once_for_some(driver_for):
    """However steps are launched: with graphs, whole or in pieces, and kernel by kernel."""
    before = compilations()
    driver_for(model_files.BUILTIN, device="cuda", torch_compile=True, use_cudagraphs=True, cudagraph_max_size=64)
    assert compilations() - before == 2


@pytest.fixture(scope="module")
def texts() -> list[tuple[list[int], list[int]]]:
    """(the question, the question with its worked solution), as tokens."""
    tokenizer = Tokenizer.load("builtin")
    problems = read_problems()[:PROBLEMS]
    return [(tokenizer.encode(each.prompt), tokenizer.encode(f"{each.prompt} {each.solution}")) for each in problems]


@pytest.mark.parametrize(("dtype", "largest", "fewest_equal"), [("float32", 1e-4, 0.98), ("bfloat16", 0.3, 0.7)])
def test_real_prompts_go_on_as_on_a_cpu(driver_for, texts, dtype, largest, fewest_equal):
    """Log-probabilities agree as long as the tokens do; nearly all answers are the same to their end."""
    prompts = [prompt for prompt, _ in texts]
    found = []
    for device, kind in (("cpu", "float32"), ("cuda", dtype)):
        driver = driver_for("builtin", device=device, dtype=kind)
        driver.generate(prompts, TOKENS, logprobs=True)
        found.append([(driver.tokens[slot], driver.logprobs[slot]) for slot in range(len(prompts))])
    equal = 0
    for (theirs, their_logprobs), (mine, my_logprobs) in zip(*found, strict=True):
        same = next((index for index in range(TOKENS) if theirs[index] != mine[index]), TOKENS)
        equal += same == TOKENS
        assert all(abs(a - b) <= largest for a, b in zip(their_logprobs[:same], my_logprobs[:same], strict=True))
    assert equal >= fewest_equal * len(prompts)


# Measured against the CPU in float32: the relative difference of the perplexity over all tokens.
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-3)], ids=["float32", "bfloat16"]
)
@torch.inference_mode()
def test_the_perplexity_is_that_on_a_cpu(texts, dtype, bound, record_property):
    """The model itself with the plain attention over worked solutions, each token after those before it."""
    card = model_files.read_card("builtin", weights=True)
    perplexities = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        model = load(card, kind, "none", torch.device(device))
        losses = []
        for _, text in texts:
            token_ids = torch.tensor(text, device=device)
            losses.append(-logprobs_of(model, token_ids)[:-1].gather(1, token_ids[1:, None]).double().cpu())
        perplexities.append(float(torch.cat(losses).mean().exp()))
    on_cpu, on_gpu = perplexities
    record_property("perplexity", f"{on_cpu:.6f} on the CPU in float32, {on_gpu:.6f} on the GPU in {dtype}")
    print(f"perplexity: {on_cpu:.6f} on the CPU in float32, {on_gpu:.6f} on the GPU in {dtype}")
    assert 1 < on_cpu < 20
    assert on_gpu == pytest.approx(on_cpu, rel=bound)
