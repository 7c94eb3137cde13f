"""Traces for ``bench.admission``: requests with the length of every answer.

They are generated from a fixed seed, so a trace is the same on all machines.
"""

from dataclasses import dataclass

import numpy as np

VOCAB_SIZE = 32768
END = 0  # the token that ends an answer; it occurs nowhere else
LONGEST_PROMPT, LONGEST_ANSWER = 2048, 1024

_SEED = 20250
_MONKEYS_PROMPT, _MONKEYS_ANSWER = 700, 150  # tokens of a prompt, and mean tokens of an answer


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """A prompt and its samples. A request has only ``max_tokens``; the simulated worker has the ``lengths``."""

    tokens: np.ndarray  # uint32 [prompt tokens]
    max_tokens: int
    lengths: np.ndarray  # int64 [samples], tokens of each answer, including ``END``


@dataclass(frozen=True, eq=False)
class Trace:
    """The requests of a trace in order. All arrive at the start."""

    name: str
    requests: list[TraceRequest]

    @property
    def lengths(self) -> np.ndarray:
        """The lengths of all samples in order, int64 ``[samples]``."""
        return np.concatenate([request.lengths for request in self.requests])

    def with_known_lengths(self) -> "Trace":
        """Return the trace with a request for each sample, whose ``max_tokens`` is its true length."""
        requests = [
            TraceRequest(request.tokens, int(length), np.array([length]))
            for request in self.requests
            for length in request.lengths
        ]
        return Trace(self.name, requests)


def monkeys(prompts: int = 32, samples: int = 1024) -> Trace:
    """Return repeated sampling: few prompts with many samples each. Lengths are geometric, up to the limit."""
    rng = np.random.default_rng(_SEED)
    requests = [
        TraceRequest(
            _prompt(rng, _MONKEYS_PROMPT),
            LONGEST_ANSWER,
            np.minimum(rng.geometric(1 / _MONKEYS_ANSWER, samples), LONGEST_ANSWER),
        )
        for _ in range(prompts)
    ]
    return Trace("monkeys", requests)


def one_prompt_twice(samples: int) -> Trace:
    """Return samples of a prompt of ``monkeys``, and one sample of the same prompt with 20 further tokens."""
    rng = np.random.default_rng(_SEED)
    tokens, more, length = _prompt(rng, _MONKEYS_PROMPT), _prompt(rng, 20), 256
    first = TraceRequest(tokens, length, np.full(samples, length))
    return Trace("one prompt twice", [first, TraceRequest(np.append(tokens, more), length, np.array([length]))])


def mix(requests: int = 8192) -> Trace:
    """Return a mixed workload like ShareGPT: lognormal prompts and answers, without shared prefixes.

    As in the usual benchmark with these lengths, ``max_tokens`` is the length of the recorded answer. So every answer
    ends at its limit.
    """
    return Trace(
        "mix", [TraceRequest(tokens, length, np.array([length])) for tokens, length in _conversations(requests)]
    )


def mix_loose(requests: int = 8192) -> Trace:
    """Return ``mix`` with a ``max_tokens`` of 1,024 for all requests, as a client's default.

    Almost every answer ends before its limit, and the limit does not depend on its length.
    """
    conversations = _conversations(requests)
    return Trace(
        "mix_loose", [TraceRequest(tokens, LONGEST_ANSWER, np.array([length])) for tokens, length in conversations]
    )


def _conversations(count: int) -> list[tuple[np.ndarray, int]]:
    """Return ``count`` prompts, each with the length of its answer."""
    rng = np.random.default_rng(_SEED)
    prompts = np.clip(rng.lognormal(4.6, 1.2, count), 4, LONGEST_PROMPT).astype(np.int64)
    answers = np.clip(rng.lognormal(5.0, 0.9, count), 4, LONGEST_ANSWER).astype(np.int64)
    return [(_prompt(rng, prompt), answer) for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)]


def _prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(END + 1, VOCAB_SIZE, length).astype(np.uint32)
