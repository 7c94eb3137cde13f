"""The worker on a GPU, held against transformers in float32 on the CPU. Skipped where there is none."""

import grpc
import pytest
import torch
import transformers

from bench.server import serve
from services.common.model_files import BUILTIN
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

TOKENS = 24
CHECKPOINTS = {
    "llama": {"architecture": "llama", "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "tied": True},
}


@pytest.fixture(scope="module", params=["builtin", *CHECKPOINTS])
def directory(request, tmp_path_factory):
    if request.param == "builtin":
        return BUILTIN
    return make_checkpoint(tmp_path_factory.mktemp("model"), **CHECKPOINTS[request.param])


def generate(address: str, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    request = generate_pb2.GenerateRequest(tokens=generate_pb2.TokenPrompt(token_ids=prompt))
    request.sampling.temperature = 0
    request.stopping.max_tokens, request.stopping.ignore_eos, request.output.logprobs = TOKENS, True, True
    tokens, logprobs = [], []
    with grpc.insecure_channel(address) as channel:
        for response in scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(request):
            for sample in response.outputs.samples:
                tokens += sample.token_ids
                logprobs += sample.logprobs.chosen
    return tokens, logprobs


@pytest.mark.parametrize(
    ("dtype", "most_difference", "fewest_first_choices"), [("float32", 1e-4, 1.0), ("bfloat16", 0.25, 0.95)]
)
def test_log_probabilities_agree_with_transformers(directory, dtype, most_difference, fewest_first_choices):
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    first_choices = differences = torch.empty(0)
    with serve(model=directory, device="cuda", dtype=dtype, max_tokens_per_forward=64) as server:
        for length in (1, 16, 17, 200):
            generator = torch.Generator().manual_seed(length)
            prompt = torch.randint(5, reference.config.vocab_size, (length,), generator=generator).tolist()
            tokens, logprobs = generate(server.grpc_address, prompt)
            with torch.no_grad():
                expected = reference(torch.tensor([prompt + tokens])).logits[0, length - 1 : -1].log_softmax(-1)
            chosen = torch.tensor(tokens)
            first_choices = torch.cat((first_choices, (expected.argmax(-1) == chosen).float()))
            found = expected.gather(1, chosen[:, None])[:, 0] - torch.tensor(logprobs)
            differences = torch.cat((differences, found.abs()))
    assert len(differences) == 4 * TOKENS
    assert differences.max() <= most_difference
    assert first_choices.mean() >= fewest_first_choices
