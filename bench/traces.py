"""Recorded traces for ``bench.admission``: what clients ask for, and how long every answer turns out to be.

They are drawn from a fixed seed, so a trace is the same wherever it is made.
"""

from dataclasses import dataclass

import numpy as np

VOCAB_SIZE = 32768
END = 0  # the token that ends an answer; no prompt and no answer holds it elsewhere
LONGEST_PROMPT, LONGEST_ANSWER = 2048, 1024

_SEED = 20250
_MONKEYS_PROMPT, _MONKEYS_ANSWER = 700, 150  # tokens; of the answer, on average


@dataclass(frozen=True, eq=False)
class TraceRequest:
    """One prompt and its samples. The client knows ``max_tokens``, the trace knows the ``lengths``."""

    tokens: np.ndarray  # uint32 [prompt tokens]
    max_tokens: int
    lengths: np.ndarray  # int64 [samples], tokens of each answer, the one that ends it included


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in the order of their arrival, all at once."""

    name: str
    requests: list[TraceRequest]

    @property
    def lengths(self) -> np.ndarray:
        """Of all samples in order: int64 ``[samples]``."""
        return np.concatenate([request.lengths for request in self.requests])

    def with_known_lengths(self) -> "Trace":
        """The same samples in the same order, each a request of its own with its true length for ``max_tokens``."""
        requests = [
            TraceRequest(request.tokens, int(length), np.array([length]))
            for request in self.requests
            for length in request.lengths
        ]
        return Trace(self.name, requests)


def monkeys(prompts: int = 32, samples: int = 1024) -> Trace:
    """Repeated sampling: few prompts, many samples of each, lengths geometric and cut at the limit."""
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
    """Samples of a prompt of ``monkeys``, and one of the same prompt with 20 tokens more behind it."""
    rng = np.random.default_rng(_SEED)
    tokens, more, length = _prompt(rng, _MONKEYS_PROMPT), _prompt(rng, 20), 256
    first = TraceRequest(tokens, length, np.full(samples, length))
    return Trace("one prompt twice", [first, TraceRequest(np.append(tokens, more), length, np.array([length]))])


def mix(requests: int = 8192) -> Trace:
    """ShareGPT-like: lognormal prompts and answers, nothing in common. As in the field's benchmark with these lengths,
    clients ask for as many tokens as the recorded answer has: every answer ends at its limit."""
    return Trace(
        "mix", [TraceRequest(tokens, length, np.array([length])) for tokens, length in _conversations(requests)]
    )


def mix_loose(requests: int = 8192) -> Trace:
    """``mix`` with one limit for everything, as of a client that leaves ``max_tokens`` at a default of 1,024: almost
    every answer ends early, and the limit tells nothing about its length."""
    conversations = _conversations(requests)
    return Trace(
        "mix_loose", [TraceRequest(tokens, LONGEST_ANSWER, np.array([length])) for tokens, length in conversations]
    )


def _conversations(count: int) -> list[tuple[np.ndarray, int]]:
    """(prompt, length of the answer) each."""
    rng = np.random.default_rng(_SEED)
    prompts = np.clip(rng.lognormal(4.6, 1.2, count), 4, LONGEST_PROMPT).astype(np.int64)
    answers = np.clip(rng.lognormal(5.0, 0.9, count), 4, LONGEST_ANSWER).astype(np.int64)
    return [(_prompt(rng, prompt), answer) for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True)]


def _prompt(rng: np.random.Generator, length: int) -> np.ndarray:
    return rng.integers(END + 1, VOCAB_SIZE, length).astype(np.uint32)
