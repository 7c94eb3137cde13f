"""Greedy answers over HTTP and gRPC, held against transformers on the same checkpoint."""

import asyncio
from pathlib import Path

import grpc
import pytest
import torch
import transformers

from bench.server import serve
from tests.checkpoints import LLAMA3_ROPE, make_checkpoint
from tests.e2e.test_toka import client_of
from tests.foreign_models import make_foreign_checkpoint
from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

# Each checkpoint starts a worker that compiles for half a minute.
pytestmark = pytest.mark.slow

PAGE = 16
TOKENS = 24
CHECKPOINTS = {
    "llama-sentencepiece": {"architecture": "llama", "tokenizer": "sentencepiece", "sharded": True},
    "llama3-rope": {"architecture": "llama", "rope_scaling": LLAMA3_ROPE, "tied": True},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3", "tied": True},
}


class Reference:
    """transformers on one checkpoint, float32 on CPU."""

    def __init__(self, directory: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def greedy(self, prompt: list[int]) -> list[int]:
        tokens = self.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=TOKENS)
        return tokens[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def chooses(self, prompt: list[int], answer: list[int]) -> bool:
        """Return whether ``greedy`` gives ``answer``: each token is the likeliest one after those before it."""
        logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        return logits.argmax(-1).tolist() == answer

    def text(self, prompt: list[int], answer: list[int]) -> str:
        """Return the text that ``answer`` adds to the text of ``prompt``."""
        before = self.tokenizer.decode(prompt, skip_special_tokens=True)
        whole = self.tokenizer.decode(prompt + answer, skip_special_tokens=True)
        if "\ufffd" not in whole or "<0x00>" not in self.tokenizer.get_vocab():
            return whole[len(before) :]
        # A random SentencePiece model writes bytes that are no characters. transformers then shows a whole run of byte
        # tokens as U+FFFD, characters in it included; the server decodes the bytes.
        special = {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
        pieces = self.tokenizer.convert_ids_to_tokens([token for token in answer if token not in special])
        data = b"".join(
            bytes.fromhex(piece[3:5]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
            for piece in pieces
        )
        return data.decode(errors="replace")


@pytest.fixture(
    scope="module",
    params=[*CHECKPOINTS, "cohere2"],
)
def served(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    if request.param in CHECKPOINTS:
        make_checkpoint(directory, **CHECKPOINTS[request.param])
    else:  # through transformers
        make_foreign_checkpoint(directory, request.param)
    flags = {"model": directory, "device": "cpu", "dtype": "float32", "page_size": PAGE, "max_tokens_per_forward": 64}
    with serve(**flags) as server:
        yield server, Reference(directory)


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(5, vocab_size, (length,), generator=generator).tolist()


def greedy_request(prompt: list[int]) -> generate_pb2.GenerateRequest:
    request = generate_pb2.GenerateRequest(tokens=generate_pb2.TokenPrompt(token_ids=prompt))
    request.sampling.temperature = 0
    request.stopping.max_tokens, request.stopping.ignore_eos = TOKENS, True
    return request


@pytest.mark.parametrize("length", [1, PAGE, PAGE + 1, 200], ids=["one", "page", "page-plus-one", "chunks"])
def test_greedy_tokens_equal_transformers(served, length):
    server, reference = served
    prompt = prompt_of(length, reference.tokenizer.vocab_size)
    with grpc.insecure_channel(server.grpc_address) as channel:
        responses = scheduler_pb2_grpc.SchedulerServiceStub(channel).Generate(greedy_request(prompt))
        tokens = [token for answer in responses for sample in answer.outputs.samples for token in sample.token_ids]
    assert tokens == reference.greedy(prompt)


@pytest.mark.parametrize("text", ["Hello", "The scheduler sends plans", "12 + 30 = ", "naïve café 🙂 日本"])
def test_greedy_text_equals_transformers(served, text):
    server, reference = served
    prompt = reference.tokenizer.encode(text)
    answer = reference.greedy(prompt)
    settings = {"model": server.model, "max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with client_of(server) as client:
        whole = client.completions.create(prompt=text, **settings)
        assert whole.usage.prompt_tokens == len(prompt)
        assert whole.choices[0].text == reference.text(prompt, answer)
        stream = client.completions.create(prompt=text, stream=True, **settings)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


async def test_64_requests_at_once_equal_transformers_one_by_one(served):
    server, reference = served
    lengths = [1 + (7 * index) % 90 for index in range(64)]
    prompts = [prompt_of(length, reference.tokenizer.vocab_size, seed) for seed, length in enumerate(lengths)]
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def generate(prompt: list[int]) -> list[int]:
            tokens = []
            async for answer in stub.Generate(greedy_request(prompt)):
                tokens += [token for sample in answer.outputs.samples for token in sample.token_ids]
            return tokens

        answers = await asyncio.gather(*map(generate, prompts))
    assert [len(answer) for answer in answers] == [TOKENS] * len(prompts)
    assert all(reference.chooses(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))


def test_a_chat_equals_transformers(served):
    server, reference = served
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = reference.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with client_of(server) as client:
        answer = client.chat.completions.create(
            model=server.model, messages=messages, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].message.content == reference.text(prompt, reference.greedy(prompt))
