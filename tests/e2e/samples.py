"""What a deployment answers over gRPC, by sample, and what transformers says of it."""

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import grpc
import torch

from tokasaurus.scheduler.v1 import generate_pb2, scheduler_pb2_grpc

_ROWS_AT_ONCE = 16  # of the reference: logits of all tokens are kept


@dataclass
class Sample:
    """One sample's tokens and their log-probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def random_prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """``length`` tokens, none of them special; the same for the same arguments."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(5, vocab_size, (length,), generator=generator).tolist()


async def generate_all(address: str, requests: list[generate_pb2.GenerateRequest]) -> list[list[Sample]]:
    """All ``requests`` at once; the samples of each in order of their index."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)

        async def generate(request: generate_pb2.GenerateRequest) -> list[Sample]:
            samples: dict[int, Sample] = defaultdict(Sample)
            async for response in stub.Generate(request):
                for output in response.outputs.samples:
                    samples[output.sample_index].tokens += output.token_ids
                    samples[output.sample_index].logprobs += output.logprobs.chosen
            return [samples[index] for index in sorted(samples)]

        return await asyncio.gather(*map(generate, requests))


def request(prompt: list[int], tokens: int, *, n: int = 1, temperature: float = 0.0, seed: int = 0):
    """Asks for exactly ``tokens`` tokens and their log-probabilities."""
    made = generate_pb2.GenerateRequest(tokens=generate_pb2.TokenPrompt(token_ids=prompt), n=n)
    made.sampling.temperature, made.sampling.seed = temperature, seed
    made.stopping.max_tokens, made.stopping.ignore_eos, made.output.logprobs = tokens, True, True
    return made


@dataclass(frozen=True)
class Agreement:
    """How answers compare with a reference, token by token."""

    largest: float  # difference of a log-probability, nats
    mean: float
    first_choices: float  # share of tokens that are the reference's likeliest

    def check(self, largest: float, mean: float, first_choices: float = 0.0) -> None:
        assert self.largest <= largest, self
        assert self.mean <= mean, self
        assert self.first_choices >= first_choices, self


@torch.no_grad()
def agreement(reference: torch.nn.Module, answers: list[tuple[list[int], Sample]]) -> Agreement:
    """Of ``answers`` (prompt, sample) with ``reference``, a model of transformers, which reads the same tokens."""
    differences, first_choices = [], []
    by_length: dict[int, list[tuple[list[int], Sample]]] = defaultdict(list)
    for prompt, sample in answers:
        assert len(sample.logprobs) == len(sample.tokens) > 0
        by_length[len(prompt) + len(sample.tokens)].append((prompt, sample))
    for same in by_length.values():
        for start in range(0, len(same), _ROWS_AT_ONCE):
            part = same[start : start + _ROWS_AT_ONCE]
            logits = reference(torch.tensor([prompt + sample.tokens for prompt, sample in part])).logits
            for (prompt, sample), row in zip(part, logits, strict=True):
                expected = row[len(prompt) - 1 : -1].log_softmax(-1)
                chosen = torch.tensor(sample.tokens)
                found = expected.gather(1, chosen[:, None])[:, 0]
                differences.append((found - torch.tensor(sample.logprobs)).abs())
                first_choices.append((expected.argmax(-1) == chosen).float())
    found = torch.cat(differences)
    # A difference that is no number would pass every bound.
    assert bool(found.isfinite().all())
    return Agreement(float(found.max()), float(found.mean()), float(torch.cat(first_choices).mean()))
