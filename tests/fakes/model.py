"""What a worker does with plans, without a model: strict book-keeping, and a hash for the next token.

The KV cache is played by a table that holds, for every position of every page, a hash of all tokens up to there. A
plan that lets a sequence read a page with anything else in it (reused too early, shared wrongly, copied too late) is
a violation, as is every plan that breaks the contract.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.packed import fill, read_fixed32
from tokasaurus.worker.v1 import plan_pb2

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1

# (tokens so far, sample index) -> next token, or None to leave the choice to the hash.
Script = Callable[[Sequence[int], int], int | None]


class Violation(Exception):
    """The plan breaks the contract."""


@dataclass(frozen=True)
class FakeShape:
    """Sizes of the fake worker; the defaults suit the built-in model's tokenizer."""

    vocab_size: int = 2048
    page_size: int = 16
    page_count: int = 1024
    max_slots: int = 256
    max_tokens_per_step: int = 512
    max_context_tokens: int = 2048
    max_top_logprobs: int = 20
    max_plans_in_flight: int = 64
    first_token: int = 16  # the hash chooses tokens from here up
    eos_token_id: int = 0
    eos_every: int = 0  # one token in so many is eos_token_id; 0 = never


class FakeModel:
    """State of one worker incarnation; ``apply`` answers one plan. Used by one thread at a time."""

    def __init__(self, shape: FakeShape, script: Script | None = None) -> None:
        self.shape = shape
        self.script = script
        slots, self._width = shape.max_slots, -(-shape.max_context_tokens // shape.page_size) + 1
        self.step = 0
        self.active = np.zeros(slots, bool)
        self.known = np.zeros(slots, np.int64)  # tokens the worker has, sampled ones included
        self.computed = np.zeros(slots, np.int64)  # tokens whose KV is written
        self.page_counts = np.zeros(slots, np.int64)
        self.tables = np.zeros((slots, self._width), np.int64)
        self.holders = np.zeros(shape.page_count, np.int64)
        self.kv = np.zeros((shape.page_count, shape.page_size), np.uint64)
        self.last_token = np.zeros(slots, np.uint64)
        self.hash = np.zeros(slots, np.uint64)  # of the computed tokens
        self.noise = np.zeros(slots, np.uint64)
        self.logprobs = np.zeros(slots, bool)
        self.top_logprobs = np.zeros(slots, np.int64)
        self.prefix_hashes: dict[int, np.ndarray] = {}  # slot -> hash after each token given at admission
        self.given_counts = np.zeros(slots, np.int64)  # of known, those that came with the admission
        self.given: dict[int, np.ndarray] = {}
        self.tokens: dict[int, list[int]] = {}  # slot -> tokens so far; kept only for a script
        self.sample_index: dict[int, int] = {}
        self.fail_tokens: dict[int, str] = {}  # a slot whose prompt begins with this token fails
        self.batch = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self.prefilled_tokens = 0  # tokens computed from prompts, for tests
        self.peak_pages = 0

    def apply(self, plan: plan_pb2.StepPlan) -> plan_pb2.StepResult:
        """Run one plan. Raises ``Violation``."""
        if plan.step != self.step + 1:
            raise Violation(f"step {plan.step} after {self.step}")
        self.step = plan.step
        self._release(read_fixed32(plan.release_slots).astype(np.int64))
        for admission in plan.admissions:
            self._admit(admission)
        self._append(read_fixed32(plan.append_slots).astype(np.int64), read_fixed32(plan.append_pages).astype(np.int64))
        self._copy(read_fixed32(plan.copy_source_pages), read_fixed32(plan.copy_target_pages))
        for admission in plan.admissions:
            self._check_cached(admission.slot, admission.cached_tokens)
        if plan.HasField("batch"):
            slots = read_fixed32(plan.batch.slots).astype(np.int64)
            counts = read_fixed32(plan.batch.token_counts).astype(np.int64)
            self.batch = (slots, counts if len(counts) else np.ones(len(slots), np.int64))
        self.peak_pages = max(self.peak_pages, int((self.holders > 0).sum()))
        return self._forward()

    def _release(self, slots: np.ndarray) -> None:
        for slot in slots:
            _require(slot < self.shape.max_slots and self.active[slot], f"release of slot {slot}, which is free")
            self.active[slot] = False
            self.holders[self.tables[slot, : self.page_counts[slot]]] -= 1
            for per_slot in (self.prefix_hashes, self.given, self.tokens, self.sample_index):
                per_slot.pop(int(slot), None)

    def _admit(self, admission: plan_pb2.Admission) -> None:
        slot, pages = admission.slot, read_fixed32(admission.pages).astype(np.int64)
        tokens = read_fixed32(admission.token_ids)
        _require(slot < self.shape.max_slots and not self.active[slot], f"admission into slot {slot}, which is taken")
        _require(len(tokens) > 0 and (tokens < self.shape.vocab_size).all(), "no tokens, or outside the vocabulary")
        _require(len(tokens) < self.shape.max_context_tokens, "the sequence fills the context")
        _require(admission.cached_tokens < len(tokens), "cached_tokens leaves nothing to compute")
        _require(admission.HasField("sampling"), "an admission without sampling settings")
        _require(len(set(pages.tolist())) == len(pages), "a page twice in one table")
        self.active[slot] = True
        self.known[slot], self.computed[slot] = len(tokens), admission.cached_tokens
        self.page_counts[slot] = 0
        self.given_counts[slot] = len(tokens)
        hashes = _prefix_hashes(tokens)
        self.prefix_hashes[slot], self.given[slot] = hashes, tokens
        self.hash[slot] = hashes[admission.cached_tokens - 1] if admission.cached_tokens else 0
        self.last_token[slot] = tokens[-1]
        sampling = admission.sampling
        self.noise[slot] = _noise(sampling.temperature, sampling.seed, sampling.sample_index)
        self.logprobs[slot], self.top_logprobs[slot] = sampling.logprobs, sampling.top_logprobs
        self.sample_index[slot] = sampling.sample_index
        if self.script is not None:
            self.tokens[slot] = tokens.tolist()
        self._append(np.full(len(pages), slot), pages)

    def _append(self, slots: np.ndarray, pages: np.ndarray) -> None:
        _require(len(slots) == len(pages), "append arrays differ in length")
        if len(slots) == 0:
            return
        _require((pages < self.shape.page_count).all(), "a page outside the pool")
        _require(slots.max() < self.shape.max_slots and self.active[slots].all(), "pages for a free slot")
        if len(np.unique(slots)) == len(slots):
            _require(self.page_counts[slots].max() < self._width, "a table longer than the context")
            self.tables[slots, self.page_counts[slots]] = pages
            self.page_counts[slots] += 1
        else:
            for slot, page in zip(slots, pages, strict=True):
                _require(self.page_counts[slot] < self._width, "a table longer than the context")
                self.tables[slot, self.page_counts[slot]] = page
                self.page_counts[slot] += 1
        np.add.at(self.holders, pages, 1)

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        _require(len(sources) == len(targets), "copy arrays differ in length")
        if len(sources):
            _require(max(sources.max(), targets.max()) < self.shape.page_count, "copy outside the pool")
            _require((self.holders[targets] == 1).all(), "copy onto a page that is free or shared")
            _require(len(np.intersect1d(sources, targets)) == 0, "a page is both copied and copied onto")
            self.kv[targets] = self.kv[sources]

    def _check_cached(self, slot: int, cached: int) -> None:
        size = self.shape.page_size
        _require(cached <= self.page_counts[slot] * size, "cached tokens beyond the pages")
        pages = self.tables[slot, : -(-cached // size)]
        found = self.kv[pages].reshape(-1)[:cached]
        _require(
            np.array_equal(found, self.prefix_hashes[slot][:cached]), f"slot {slot}: cached pages hold other tokens"
        )

    def _forward(self) -> plan_pb2.StepResult:
        slots, counts = self.batch
        _require(len(np.unique(slots)) == len(slots), "a slot twice in the batch")
        _require(len(slots) == 0 or slots.max() < self.shape.max_slots, "a slot outside the range")
        _require(self.active[slots].all(), "a free slot in the batch")
        _require(len(counts) == len(slots) and (counts >= 1).all(), "token counts")
        _require(counts.sum() <= self.shape.max_tokens_per_step, f"{counts.sum()} tokens in one step")
        ends = self.computed[slots] + counts
        _require((ends <= self.known[slots]).all(), "a row past its known tokens")
        _require((ends < self.shape.max_context_tokens).all(), "a row past the context")
        _require((ends <= self.page_counts[slots] * self.shape.page_size).all(), "a row without pages")
        fed_back = self.computed[slots] >= self.given_counts[slots]
        self._decode(slots[fed_back])
        for slot, count in zip(slots[~fed_back].tolist(), counts[~fed_back].tolist(), strict=True):
            self._prefill(slot, count)
        return self._sample(slots[ends == self.known[slots]])

    def _decode(self, slots: np.ndarray) -> None:
        size, position = self.shape.page_size, self.computed[slots]
        pages = self.tables[slots, position // size]
        _require((self.holders[pages] == 1).all(), "a write to a shared page")
        self.hash[slots] = self.hash[slots] * _FACTOR + self.last_token[slots] + np.uint64(1)
        self.kv[pages, position % size] = self.hash[slots]
        self.computed[slots] += 1

    def _prefill(self, slot: int, count: int) -> None:
        size, start = self.shape.page_size, int(self.computed[slot])
        positions = np.arange(start, start + count)
        _require(start + count <= len(self.given[slot]), "one row over prompt and answer")
        pages = self.tables[slot, positions // size]
        _require((self.holders[pages] == 1).all(), "a write to a shared page")
        self.kv[pages, positions % size] = self.prefix_hashes[slot][positions]
        self.hash[slot] = self.prefix_hashes[slot][start + count - 1]
        self.computed[slot] += count
        self.prefilled_tokens += count

    def _sample(self, slots: np.ndarray) -> plan_pb2.StepResult:
        shape, result = self.shape, plan_pb2.StepResult(step=self.step)
        mixed = _mix(self.hash[slots] ^ self.noise[slots])
        tokens = _choose(shape, mixed)
        if self.script is not None:
            for row, slot in enumerate(slots.tolist()):
                token = self.script(self.tokens[slot], self.sample_index[slot])
                tokens[row] = tokens[row] if token is None else token
                self.tokens[slot].append(int(tokens[row]))
        self.last_token[slots] = tokens
        self.known[slots] += 1
        failing = (
            [row for row, slot in enumerate(slots.tolist()) if int(self.given[slot][0]) in self.fail_tokens]
            if self.fail_tokens
            else []
        )
        for row in failing:
            reason = self.fail_tokens[int(self.given[int(slots[row])][0])]
            result.failures.add(slot=int(slots[row]), message=reason)
        keep = np.delete(np.arange(len(slots)), failing)
        slots, tokens, mixed = slots[keep], tokens[keep], mixed[keep]
        fill(result, "slots", slots)
        fill(result, "token_ids", tokens)
        self._add_logprobs(result, slots, tokens, mixed)
        return result

    def _add_logprobs(self, result, slots: np.ndarray, tokens: np.ndarray, mixed: np.ndarray) -> None:
        asked = self.logprobs[slots]
        if not asked.any():
            return
        chosen = chosen_logprob(tokens)
        fill(result, "logprobs", np.where(asked, chosen, np.nan).astype(np.float32))
        counts = np.where(asked, self.top_logprobs[slots], 0)
        if counts.any():
            fill(result, "top_counts", counts)
            for token, count in zip(tokens.tolist(), counts.tolist(), strict=True):
                ids = top_token_ids(token, count, self.shape.vocab_size)
                fill(result, "top_token_ids", ids)
                fill(result, "top_logprobs", chosen_logprob(ids))


def continuation(
    shape: FakeShape,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    sample_index: int = 0,
    temperature: float = 1.0,
) -> list[int]:
    """The next ``count`` tokens that a fake worker gives behind ``prompt``, whatever batches it runs in."""
    noise = np.uint64(_noise(temperature, seed, sample_index))
    value = int(_prefix_hashes(np.array(prompt, np.uint32))[-1])
    tokens: list[int] = []
    for _ in range(count):
        mixed = _mix(np.array([value], np.uint64) ^ noise)
        tokens.append(int(_choose(shape, mixed)[0]))
        value = (value * int(_FACTOR) + tokens[-1] + 1) & _MASK
    return tokens


def chosen_logprob(tokens: np.ndarray) -> np.ndarray:
    """The fake's log-probability of each token, wherever it appears."""
    return (-(np.asarray(tokens, np.float64) % 97) / 16 - 0.0625).astype(np.float32)


def top_token_ids(token: int, count: int, vocab_size: int) -> np.ndarray:
    """The fake's most likely tokens where it chose ``token``."""
    return (token + np.arange(count)) % vocab_size


def reply_script(reply: Sequence[int]) -> Script:
    """Every answer is ``reply``, over and over: the longest tail of the tokens that begins it decides what is next."""
    reply = list(reply)

    def next_token(tokens: Sequence[int], sample_index: int) -> int:
        for length in range(min(len(reply), len(tokens)), 0, -1):
            if list(tokens[-length:]) == reply[:length]:
                return reply[length % len(reply)]
        return reply[0]

    return next_token


def _noise(temperature: float, seed: int, sample_index: int) -> int:
    return 0 if temperature == 0 else (seed * 31 + sample_index * 0xD1B54A32D192ED03) & _MASK


def _choose(shape: FakeShape, mixed: np.ndarray) -> np.ndarray:
    tokens = np.uint64(shape.first_token) + mixed % np.uint64(shape.vocab_size - shape.first_token)
    if shape.eos_every:
        tokens[_mix(mixed) % np.uint64(shape.eos_every) == 0] = shape.eos_token_id
    return tokens


def _prefix_hashes(tokens: np.ndarray) -> np.ndarray:
    hashes, value = [], 0
    factor = int(_FACTOR)
    for token in tokens.tolist():
        value = (value * factor + token + 1) & _MASK
        hashes.append(value)
    return np.array(hashes, np.uint64)


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _require(condition, message: str) -> None:
    if not condition:
        raise Violation(message)
