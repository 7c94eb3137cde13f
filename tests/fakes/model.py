"""A worker without a model: it checks plans with the scheduler's checker, and hashes give the next tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from services.common.packed import fill
from services.common.plan.codec import decode_limits
from services.common.plan.types import WorkerLimits
from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.hashes import next_hashes, prefix_hashes
from services.scheduler.record.violation import Violation as Violation
from tests.fakes.experts import LAYOUT, FollowedExperts
from tests.fakes.grammars import FollowedGrammars
from tokasaurus.worker.v1 import plan_pb2, worker_pb2

_MASK = (1 << 64) - 1

PROCESSED_LESS = 0.5  # by which the fake's processed log-probabilities are less than its raw ones
MOST_DRAWABLE = 3
_OPENING_TOKENS = 8  # in which a reasoning section begins, by the contract

# (tokens so far, sample index) -> next token, or None to leave the choice to the hash.
Script = Callable[[Sequence[int], int], int | None]


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
    hydragen: bool = True
    max_micro_batches: int = 8
    prompt_logprobs: bool = True
    grammars: bool = True  # of the built-in model's tokenizer
    processed_logprobs: bool = True
    thinking_budgets: bool = True
    sleeps: bool = True
    window_tokens: int = 0
    routed_experts: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    first_token: int = 16  # the hash chooses tokens from here up
    eos_token_id: int = 0
    eos_every: int = 0  # number of tokens of which one is eos_token_id; 0 = never

    @property
    def reports(self) -> bool:
        """True if this rank sends the tokens."""
        return self.pp_rank == self.pp_size - 1 and self.tp_rank == 0

    @property
    def limits(self) -> WorkerLimits:
        """Return the limits that plans must keep."""
        return decode_limits(self.worker_info())

    def worker_info(self, incarnation_id: str = "") -> worker_pb2.WorkerInfo:
        """Return the info that a worker of this shape sends."""
        return worker_pb2.WorkerInfo(
            model="fake", incarnation_id=incarnation_id, contract_version="1.1", page_size=self.page_size,
            page_count=self.page_count, max_slots=self.max_slots, max_tokens_per_step=self.max_tokens_per_step,
            max_context_tokens=self.max_context_tokens, vocab_size=self.vocab_size,
            max_top_logprobs=self.max_top_logprobs, max_plans_in_flight=self.max_plans_in_flight,
            hydragen=bool(self.hydragen and not self.window_tokens), max_micro_batches=self.max_micro_batches,
            prompt_logprobs=bool(self.prompt_logprobs), grammars=bool(self.grammars),
            processed_logprobs=bool(self.processed_logprobs), thinking_budgets=bool(self.thinking_budgets),
            window_tokens=self.window_tokens, sleeps=bool(self.sleeps),
            routed_experts=LAYOUT if self.routed_experts else None,
            tensor_parallel=worker_pb2.Rank(rank=self.tp_rank, size=self.tp_size),
            pipeline_parallel=worker_pb2.Rank(rank=self.pp_rank, size=self.pp_size), device="fake", dtype="float32",
        )  # fmt: skip


class FollowedBudget:
    """The thinking budget of one slot, by its definition."""

    def __init__(self, admission: plan_pb2.Admission) -> None:
        tokens = list(admission.token_ids)
        self._budget = admission.sampling.parameters.thinking
        self.answer = tokens[admission.prompt_tokens or len(tokens) :]

    def next_token(self, token: int) -> int:
        """Return ``token``, or the token that ends the section."""
        thoughts = self.answer
        if not self._budget.opened:
            if self._budget.begin_token_id not in thoughts[:_OPENING_TOKENS]:
                return token
            thoughts = thoughts[thoughts.index(self._budget.begin_token_id) + 1 :]
        used_up = len(thoughts) >= self._budget.tokens and self._budget.end_token_id not in thoughts
        return self._budget.end_token_id if used_up else token


class FakeModel:
    """A worker incarnation. ``apply`` computes the result of a plan. Used by one thread at a time."""

    def __init__(self, shape: FakeShape, script: Script | None = None) -> None:
        self.shape = shape
        self.script = script
        self.weights = 0  # number of the weights; each chooses other tokens
        self.checker = PlanChecker(shape.limits)
        self.noise = np.zeros(shape.max_slots, np.uint64)
        self.logprobs = np.zeros(shape.max_slots, bool)
        self.top_logprobs = np.zeros(shape.max_slots, np.int64)
        self.processed = np.zeros(shape.max_slots, bool)
        self.thinking: dict[int, FollowedBudget] = {}
        self.tokens: dict[int, list[int]] = {}  # slot -> tokens so far; kept only for a script
        self.sample_index: dict[int, int] = {}
        self.grammars = FollowedGrammars()
        self.experts = FollowedExperts()
        self.fail_tokens: dict[int, str] = {}  # a slot whose prompt begins with this token fails
        self.scored_tokens = 0  # tokens of prompts

    @property
    def prefilled_tokens(self) -> int:
        """Tokens computed from prompts."""
        return self.checker.prefilled_tokens

    @property
    def peak_pages(self) -> int:
        """Most pages that were held at once."""
        return self.checker.peak_pages

    def apply(self, plan: plan_pb2.StepPlan) -> plan_pb2.StepResult:
        """Run one plan. Raises ``Violation``."""
        sampling = self.checker.apply(plan)
        for admission in plan.admissions:
            self._admit(admission)
        result = self._sample(sampling)
        self._score(result)
        self.experts.send(result, self.checker.last.batch.slots, self.checker.slots.computed)
        return result

    def _score(self, result: plan_pb2.StepResult) -> None:
        for slot, due in self.checker.scores_due.items():
            scored = self.checker.prompts[slot][due.start : due.stop]
            self.scored_tokens += len(scored)
            scores = result.prompts.add(slot=slot, start=due.start)
            fill(scores, "logprobs", chosen_logprob(scored))
            fill(scores, "ranks", scored % 7 + 1)
            ids = np.concatenate([top_token_ids(token, due.top, self.shape.vocab_size) for token in scored.tolist()])
            fill(scores, "top_token_ids", ids)
            fill(scores, "top_logprobs", chosen_logprob(ids))

    def _admit(self, admission: plan_pb2.Admission) -> None:
        slot, sampling = admission.slot, admission.sampling
        parameters = sampling.parameters
        temperature = parameters.temperature if parameters.HasField("temperature") else 1.0
        self.noise[slot] = _noise(temperature, parameters.seed, sampling.sample_index)
        self.logprobs[slot] = sampling.logprobs or sampling.top_logprobs > 0
        self.top_logprobs[slot] = sampling.top_logprobs
        self.sample_index[slot] = sampling.sample_index
        self.grammars.admit(admission)
        self.experts.admit(admission)
        self.processed[slot] = sampling.processed_logprobs
        self.thinking.pop(slot, None)
        if parameters.HasField("thinking"):
            self.thinking[slot] = FollowedBudget(admission)
        if self.script is not None:
            self.tokens[slot] = list(admission.token_ids)

    def _sample(self, slots: np.ndarray) -> plan_pb2.StepResult:
        shape, result = self.shape, plan_pb2.StepResult(step=self.checker.last.step)
        mixed = _mix(self.checker.hash[slots] ^ self.noise[slots] ^ np.uint64(self.weights))
        tokens = _choose(shape, mixed)
        if self.script is not None:
            for row, slot in enumerate(slots.tolist()):
                token = self.script(self.tokens[slot], self.sample_index[slot])
                tokens[row] = tokens[row] if token is None else token
        for row, slot in enumerate(slots.tolist()):
            if slot in self.thinking:
                tokens[row] = self.thinking[slot].next_token(int(tokens[row]))
        self.grammars.follow(slots, tokens)
        for row, slot in enumerate(slots.tolist()):
            if slot in self.thinking:
                self.thinking[slot].answer.append(int(tokens[row]))
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True) if self.script is not None else ():
            self.tokens[slot].append(token)
        self.checker.sampled(tokens)
        self.experts.sampled(slots, tokens)
        failing = self._failing(slots)
        for row, message in failing.items():
            slot = int(slots[row])
            cause = plan_pb2.FAILURE_CAUSE_FORBIDDEN_TOKENS if slot in self.grammars.forbidden else None
            result.failures.add(slot=slot, message=message, cause=cause)
        keep = np.delete(np.arange(len(slots)), list(failing))
        slots, tokens, mixed = slots[keep], tokens[keep], mixed[keep]
        fill(result, "slots", slots)
        fill(result, "token_ids", tokens)
        self._add_logprobs(result, slots, tokens, mixed)
        return result

    def _failing(self, slots: np.ndarray) -> dict[int, str]:
        """Why rows of ``slots`` fail."""
        rows = enumerate(slots.tolist())
        failing = {row: self.grammars.failures[slot] for row, slot in rows if slot in self.grammars.failures}
        if self.fail_tokens:
            first = [int(self.checker.prompts[slot][0]) for slot in slots.tolist()]
            failing |= {row: self.fail_tokens[token] for row, token in enumerate(first) if token in self.fail_tokens}
        return failing

    def _add_logprobs(self, result, slots: np.ndarray, tokens: np.ndarray, mixed: np.ndarray) -> None:
        asked = self.logprobs[slots]
        if not asked.any():
            return
        chosen = chosen_logprob(tokens) - np.where(self.processed[slots], PROCESSED_LESS, 0)
        fill(result, "logprobs", np.where(asked, chosen, np.nan).astype(np.float32))
        counts = np.where(asked, self.top_logprobs[slots], 0)
        # Of a processed row no more than MOST_DRAWABLE tokens can be drawn.
        counts = np.where(self.processed[slots], np.minimum(counts, MOST_DRAWABLE), counts)
        if counts.any():
            fill(result, "top_counts", counts)
            for token, count, slot in zip(tokens.tolist(), counts.tolist(), slots.tolist(), strict=True):
                ids = top_token_ids(token, count, self.shape.vocab_size)
                fill(result, "top_token_ids", ids)
                fill(result, "top_logprobs", chosen_logprob(ids) - PROCESSED_LESS * self.processed[slot])


def continuation(
    shape: FakeShape,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int = 0,
    sample_index: int = 0,
    temperature: float = 1.0,
    weights: int = 0,
) -> list[int]:
    """The next ``count`` tokens that a fake worker gives behind ``prompt``, whatever batches it runs in."""
    noise = np.uint64(_noise(temperature, seed, sample_index) ^ weights)
    value = prefix_hashes(np.array(prompt, np.uint32))[-1:]
    tokens: list[int] = []
    for _ in range(count):
        chosen = _choose(shape, _mix(value ^ noise))
        tokens.append(int(chosen[0]))
        value = next_hashes(value, chosen)
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


def parrot_script(user: int, end: int, assistant: int, eos: int) -> Script:
    """Answer with the last message of the user: the tokens between ``user`` and ``end`` follow ``assistant``, and then
    ``eos``. A resumed answer continues. Without a message, the hash gives the tokens."""

    def next_token(tokens: Sequence[int], sample_index: int) -> int | None:
        tokens = list(tokens)
        if user not in tokens or assistant not in tokens:
            return None
        begin = len(tokens) - tokens[::-1].index(user)
        said = tokens[begin : tokens.index(end, begin)]
        answered = tokens[::-1].index(assistant)
        return said[answered] if answered < len(said) else eos

    return next_token


def _noise(temperature: float, seed: int, sample_index: int) -> int:
    return 0 if temperature == 0 else (seed * 31 + sample_index * 0xD1B54A32D192ED03) & _MASK


def _choose(shape: FakeShape, mixed: np.ndarray) -> np.ndarray:
    tokens = np.uint64(shape.first_token) + mixed % np.uint64(shape.vocab_size - shape.first_token)
    if shape.eos_every:
        tokens[_mix(mixed) % np.uint64(shape.eos_every) == 0] = shape.eos_token_id
    return tokens


def _mix(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
