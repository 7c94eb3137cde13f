"""The least that can drive a runner: hands out pages, numbers steps, and keeps what came back."""

from dataclasses import dataclass, field

import numpy as np

from services.common.plan.types import Admission, Batch, Plan, SamplingSettings
from services.worker.runner.runner import StepRunner
from services.worker.step.output import StepOutput
from tokasaurus.common.v1.sampling_pb2 import Sampling, ThinkingBudget

NONE = np.empty(0, np.int64)


def settings(**changes) -> SamplingSettings:
    """Return greedy settings with ``changes`` of the settings or of their parameters."""
    own = {name: changes.pop(name) for name in SamplingSettings._fields if name in changes}
    return SamplingSettings(Sampling(**{"temperature": 0.0} | changes), **own)


def budget(tokens: int, end_token_id: int, begin_token_id: int | None = None) -> ThinkingBudget:
    """Return the budget of a section that is open where the prompt ends, or begins with ``begin_token_id``."""
    opened = begin_token_id is None
    return ThinkingBudget(tokens=tokens, end_token_id=end_token_id, begin_token_id=begin_token_id, opened=opened)


def admission(slot: int, token_ids, pages, *, cached_tokens: int = 0, sample_index: int = 0, **sampling) -> Admission:
    tokens, pages = np.asarray(token_ids), np.asarray(pages, np.int64)
    return Admission(slot, tokens, cached_tokens, pages, settings(**sampling), sample_index=sample_index)


def batch(slots, token_counts=None) -> Batch:
    slots = np.asarray(slots, np.int64)
    return Batch(slots, np.ones_like(slots) if token_counts is None else np.asarray(token_counts, np.int64))


@dataclass
class Driver:
    """One runner and its next step."""

    runner: StepRunner
    steps: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)  # slot -> tokens sampled
    logprobs: dict[int, list[float]] = field(default_factory=dict)

    def reset(self) -> None:
        self.runner.reset()
        self.steps = 0
        self.tokens, self.logprobs = {}, {}

    def plan(self, **parts) -> Plan:
        """The next plan; what is left out is empty."""
        arrays = {name: np.asarray(value) if isinstance(value, list) else value for name, value in parts.items()}
        return Plan(**{"step": self.steps + 1} | arrays)

    def run(self, **parts) -> StepOutput:
        output = self.runner.run(self.plan(**parts))
        self.steps += 1
        sampled = output.sampled
        for index, (slot, token) in enumerate(zip(sampled.slots.tolist(), sampled.token_ids.tolist(), strict=True)):
            self.tokens.setdefault(slot, []).append(token)
            if sampled.logprobs is not None:
                self.logprobs.setdefault(slot, []).append(float(sampled.logprobs[index]))
        return output

    def generate(self, prompts, count: int, *, chunk: int | None = None, **sampling) -> list[list[int]]:
        """``count`` tokens for each prompt, in slots 0, 1, ...; prompts in chunks of ``chunk`` tokens."""
        size = self.runner.limits.page_size
        first_page, admissions = 0, []
        for slot, prompt in enumerate(prompts):
            pages = range(first_page, first_page + -(-(len(prompt) + count) // size))
            first_page = pages.stop
            admissions.append(admission(slot, prompt, pages, **sampling))
        left = {slot: len(prompt) for slot, prompt in enumerate(prompts)}
        parts = {"admissions": tuple(admissions)}
        while any(len(self.tokens.get(slot, ())) < count for slot in left):
            counts, budget = {}, self.runner.limits.max_tokens_per_step
            for slot, tokens in left.items():
                if len(self.tokens.get(slot, ())) < count and budget:
                    counts[slot] = min(max(tokens, 1), chunk or tokens or 1, budget)
                    budget -= counts[slot]
                    left[slot] = max(0, tokens - counts[slot])
            self.run(batch=batch(list(counts), list(counts.values())), **parts)
            parts = {}
        return [self.tokens[slot] for slot in left]
