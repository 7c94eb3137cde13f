"""The state of every slot, as arrays over slots. Owned by the compute thread."""

from collections.abc import Sequence

import numpy as np
import torch

from services.common.packed import read_fixed32, read_float
from services.common.plan.slots import SlotState
from services.common.plan.types import Admission, WorkerLimits
from services.common.sampling import PARAMETERS
from services.worker.step.noise import scales_of, stems
from tokasaurus.common.v1.sampling_pb2 import ThinkingBudget

OPENING_TOKENS = 8  # a reasoning section must begin within the first tokens of an answer
_NONE = np.empty(0, np.int64)
_NO_PENALTIES = [1.0, 0.0, 0.0]  # repetition, frequency, presence
_NEVER = 2**30  # beyond every position
# Steps for which a forced token is tried again while the grammar does not allow it: it may require the rest of a
# UTF-8 character first.
_RETRIES = 4


class SlotTable(SlotState):
    """Lengths, page tables and sampling settings on the host, and the last sampled tokens on the device.

    The next input of a sequence is its last token, or a token of ``prompts`` until the prompt is computed.
    """

    def __init__(self, limits: WorkerLimits, device: torch.device) -> None:
        super().__init__(limits)
        slots, self._page_size = limits.max_slots, limits.page_size
        self.failed = np.zeros(slots, bool)  # logits were not numbers in some step: the cached values are invalid
        self.prompts = [_NONE] * slots  # [given] int64 each, until all of it is computed
        self.last_tokens = torch.zeros(slots, dtype=torch.int64, device=device)

        # Sampling parameters. The message has the same names.
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.top_k = np.zeros(slots, np.int64)
        self.min_p = np.zeros(slots, np.float32)
        # [slots, 3] float32, in one array because the kernel takes all of them.
        self.penalties = np.array([_NO_PENALTIES] * slots, np.float32)
        self.repetition_penalty, self.frequency_penalty, self.presence_penalty = self.penalties.T
        self._columns = [(name, getattr(self, name), parameter.default) for name, parameter in PARAMETERS.items()]

        self.seed = np.zeros(slots, np.uint64)
        self.sample_index = np.zeros(slots, np.uint64)
        self.logprobs = np.zeros(slots, bool)
        self.top_logprobs = np.zeros(slots, np.int64)
        self.prompt_tokens = np.zeros(slots, np.int64)  # length of the prompt; later tokens were generated
        self.penalised = np.zeros(slots, bool)  # any penalty is in use
        self.prompt_logprobs = np.full(slots, -1, np.int64)  # most likely tokens beside each; -1 = not requested
        self.prompt_start = np.ones(slots, np.int64)  # position of the first prompt token to score
        self.processed = np.zeros(slots, bool)  # log-probabilities are of the distribution after all adjustments
        self.masked = np.zeros(slots, bool)  # has a grammar
        # Position of the first token whose experts the next result carries; -1 = the sequence did not ask.
        self.routed_start = np.full(slots, -1)
        self.routed = 0  # slots in use with a ``routed_start``
        # Thinking budgets. A token can be forced only at positions p with force_from <= p < force_until.
        self.budgets = 0  # slots in use that have a budget
        self.force_from = np.full(slots, _NEVER)
        self.force_until = np.zeros(slots, np.int64)
        self.think_tokens = np.zeros(slots, np.int64)
        self.think_begin = np.full(slots, -1)  # token; -1 = the section is open where the prompt ends
        self.think_end = np.zeros(slots, np.int64)  # token
        self.biased = np.zeros(slots, bool)
        self.biases: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # slot -> token ids, values
        # Computed from the settings by ``derive``.
        self.scales = np.zeros(slots, np.float32)  # one over the temperature; 0 = greedy
        self.stems = np.zeros(slots, np.uint64)  # of the noise keys
        self.plain = np.ones(slots, bool)  # only the temperature affects the draw, and only its token is returned

    def clear(self) -> None:
        """Free every slot."""
        self.release(np.flatnonzero(self.used))

    def release(self, slots: np.ndarray) -> None:
        """Free ``slots [n]``, which are in use."""
        super().release(slots)
        self.failed[slots] = False
        if self.routed:
            self.routed -= int(np.count_nonzero(self.routed_start[slots] >= 0))
            self.routed_start[slots] = -1
        if self.budgets:
            self.budgets -= int(np.count_nonzero(self.force_until[slots]))
            self.force_until[slots] = 0
        for slot in slots.tolist():
            self.prompts[slot] = _NONE
            self.biases.pop(slot, None)

    def admit(self, admission: Admission) -> None:
        """Put a sequence into its slot, which is free."""
        super().admit(admission)
        slot, settings = admission.slot, admission.sampling
        self.prompts[slot] = admission.token_ids
        parameters = settings.parameters
        assert parameters is not None  # check_plan refuses such a plan
        for name, column, default in self._columns:
            column[slot] = getattr(parameters, name) if parameters.HasField(name) else default
        self.seed[slot] = parameters.seed
        self.sample_index[slot] = admission.sample_index
        self.logprobs[slot] = settings.wants_logprobs
        self.top_logprobs[slot] = settings.top_logprobs
        self.prompt_tokens[slot] = admission.prompt_length
        self.penalised[slot] = self.penalties[slot].tolist() != _NO_PENALTIES
        self.prompt_logprobs[slot] = -1 if settings.prompt_logprobs is None else settings.prompt_logprobs
        self.prompt_start[slot] = max(1, settings.prompt_logprobs_start)
        self.processed[slot] = settings.processed_logprobs
        self.masked[slot] = settings.grammar != ""
        if admission.routed_start is not None:
            self.routed_start[slot] = admission.routed_start
            self.routed += 1
        if parameters.HasField("thinking"):
            self._limit_thinking(slot, parameters.thinking)
        self.biased[slot] = len(parameters.logit_bias_token_ids) > 0
        if self.biased[slot]:
            token_ids = read_fixed32(parameters.logit_bias_token_ids).astype(np.int64)
            self.biases[slot] = token_ids, read_float(parameters.logit_bias_values)

    def _limit_thinking(self, slot: int, budget: ThinkingBudget) -> None:
        """Set the thinking budget of ``slot``, after its other settings."""
        self.budgets += 1
        opened = budget.opened
        self.think_tokens[slot] = tokens = min(budget.tokens, _NEVER // 2)
        self.think_begin[slot] = -1 if opened else budget.begin_token_id
        self.think_end[slot] = budget.end_token_id
        first = self.prompt_tokens[slot] + tokens + (not opened)
        self.force_from[slot] = first
        self.force_until[slot] = first + 1 + (0 if opened else OPENING_TOKENS - 1) + _RETRIES * self.masked[slot]

    def may_force(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return whether the token at each of ``positions [n]`` of ``slots [n]`` may be forced, ``[n]`` bool."""
        if not self.budgets:
            return np.zeros(len(slots), bool)
        inside: np.ndarray = (self.force_from[slots] <= positions) & (positions < self.force_until[slots])
        return inside

    def are_plain(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """Return whether all rows need only a temperature. Arguments as in ``may_force``."""
        return bool(self.plain[slots].all()) and not (self.budgets and self.may_force(slots, positions).any())

    def cache_indices(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Return the indices in the cache of the tokens at ``positions [n]`` of ``slots [n]``, ``[n]`` int64."""
        size = self._page_size
        indices: np.ndarray = self.page_table[slots, positions // size].astype(np.int64) * size + positions % size
        return indices

    def admit_all(self, admissions: Sequence[Admission]) -> None:
        """Put sequences into their slots, which are free, and compute what follows from their settings."""
        for admission in admissions:
            self.admit(admission)
        if admissions:
            self.derive(np.array([admission.slot for admission in admissions]))

    def derive(self, slots: np.ndarray) -> None:
        """Compute ``scales``, ``stems`` and ``plain`` of ``slots [n]`` after their admission."""
        self.scales[slots] = scales_of(self.temperature[slots])
        self.stems[slots] = stems(self.seed[slots], self.sample_index[slots])
        cut = (self.top_k[slots] > 0) | (self.top_p[slots] < 1) | (self.min_p[slots] > 0)
        more = self.logprobs[slots] | self.penalised[slots] | self.biased[slots] | self.masked[slots]
        more |= self.routed_start[slots] >= 0
        self.plain[slots] = ~(more | (cut & (self.temperature[slots] > 0)))

    def advance(self, slots: np.ndarray, token_counts: np.ndarray, sampled_slots: np.ndarray) -> None:
        """Record a forward pass: ``token_counts [n]`` tokens of ``slots [n]``, and one token for each sampled slot."""
        computed = self.computed[slots] + token_counts
        self.computed[slots] = computed
        self.known[sampled_slots] += 1
        if self.routed:
            starts = self.routed_start[slots]
            self.routed_start[slots] = np.where(starts >= 0, np.maximum(starts, computed), -1)
        for slot in slots[computed == self.given[slots]].tolist():
            self.prompts[slot] = _NONE
