"""The runner for CPUs, which checks and applies a plan, computes, samples and advances the slots."""

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.common.plan.result import ScoredTokens, Timing
from services.common.plan.rules import check_plan
from services.common.plan.types import LastPlan, Plan, WorkerLimits
from services.worker.attention.base import AttentionBackend
from services.worker.attention.kv_cache import KvCache
from services.worker.models.decoder import DecoderModel
from services.worker.runner.inputs import Shard, StepInputs, build
from services.worker.runner.shards import ShardThreads
from services.worker.sampling.grammars import RowMasks, SlotGrammars
from services.worker.sampling.prompt_logprobs import score
from services.worker.sampling.sampler import NOTHING_SAMPLED, concatenate, sample
from services.worker.step.output import Failure, Sampled, StepOutput
from services.worker.step.slots import SlotTable

if TYPE_CHECKING:
    from services.worker.models.fused_cpu import FusedDecoder  # loads numba, which CUDA does not need

Outcome = tuple[Sampled, list[ScoredTokens]]  # of a shard or micro-batch


class StepRunner:
    """A runner for one rank on CPUs. Owns the slots and the cache. Only the compute thread calls it."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: WorkerLimits,
        threads: ShardThreads,
        fused: "FusedDecoder | None" = None,
        grammars: SlotGrammars | None = None,
    ) -> None:
        """``fused`` runs decode steps instead of ``model``. ``grammars`` is None if grammars are not supported."""
        self.limits = limits
        self.model, self.cache, self._attention, self._threads = model, cache, attention, threads
        self._fused, self._grammars = fused, grammars
        self._device = model.device
        self._slots = SlotTable(limits, self._device)
        self._last = LastPlan()
        self._barriers = {size: threading.Barrier(size) for size in range(2, threads.size + 1)}

    def reset(self) -> None:
        """Free every slot and expect step 1 next. Pages keep their content, which is unreachable."""
        self._slots.clear()
        if self._grammars is not None:
            self._grammars.clear()
        self._last = LastPlan()
        for barrier in self._barriers.values():
            barrier.reset()

    def close(self) -> None:
        """End the threads."""
        self._threads.close()
        if self._grammars is not None:
            self._grammars.close()

    def start(self, plan: Plan) -> StepOutput:
        """Run a step to its end. See ``run``."""
        return self.run(plan)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepOutput:
        """Run a step and return its output.

        Raises ``InvalidRequest`` or ``FailedPrecondition`` for a plan that breaks the contract, without changing
        anything.
        """
        started = time.perf_counter_ns()
        check_plan(plan, self._last, self._slots, self.limits)
        self._apply(plan)
        timing = Timing()
        batch = self._last.batch
        if len(batch.slots) == 0:
            return StepOutput(plan.step, NOTHING_SAMPLED, timing)
        inputs = build(batch, self._slots, self._threads.size)
        token_ids, positions = self._to_device(inputs)
        self._keep_tokens(inputs, token_ids)
        timing.prepare = time.perf_counter_ns() - started
        parts, scored = zip(*self._compute(inputs, token_ids, positions, timing), strict=True)
        sampled = parts[0] if len(parts) == 1 else concatenate(parts)
        self._keep_sampled(sampled)
        self._slots.advance(batch.slots, batch.token_counts, sampled.slots)
        scored = tuple(each for part in scored for each in part)
        return StepOutput(plan.step, sampled, timing, scored, self._failures(sampled))

    def _apply(self, plan: Plan) -> None:
        slots = self._slots
        self._last = self._last.followed_by(plan)
        if plan.releases.size:
            slots.release(plan.releases)
        for admission in plan.admissions:
            slots.admit(admission)
        if self._grammars is not None:
            self._grammars.apply(plan)
        if plan.append_slots.size:
            slots.append_pages(plan.append_slots, plan.append_pages)
        if plan.copy_sources.size:
            pages = (torch.from_numpy(array).to(self._device) for array in (plan.copy_sources, plan.copy_targets))
            self.cache.copy_pages(*pages)

    def _to_device(self, inputs: StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and positions, ``[tokens]`` int64. Ids come from the prompts and the last sampled tokens."""
        positions = torch.from_numpy(inputs.positions).to(self._device)
        last = self._slots.last_tokens[torch.from_numpy(inputs.last_slots).to(self._device)]
        if inputs.known_tokens is None:
            return last, positions
        token_ids = torch.from_numpy(inputs.known_tokens).to(self._device)
        token_ids[torch.from_numpy(inputs.last_of).to(self._device)] = last
        return token_ids, positions

    def _keep_tokens(self, inputs: StepInputs, token_ids: torch.Tensor) -> None:
        """Store ``token_ids [tokens]`` in the cache, at the indices of their keys and values."""
        slots = np.concatenate([shard.attention.token_slots for shard in inputs.shards])
        pages = self._slots.page_table[slots, inputs.positions // self.cache.page_size].astype(np.int64)
        indices = torch.from_numpy(pages * self.cache.page_size + inputs.positions % self.cache.page_size)
        self.cache.tokens.view(-1)[indices.to(self._device)] = token_ids.int()

    def _compute(
        self, inputs: StepInputs, token_ids: torch.Tensor, positions: torch.Tensor, timing: Timing
    ) -> list[Outcome]:
        barrier = None if inputs.independent else self._barriers.get(len(inputs.shards))
        timings = [timing, *(Timing() for _ in inputs.shards[1:])]  # the timing of the first shard is the step's
        jobs = [
            partial(self._compute_shard, shard, token_ids, positions, inputs.independent, barrier, each)
            for shard, each in zip(inputs.shards, timings, strict=True)
        ]
        return self._threads.run(jobs, barrier)

    @torch.inference_mode()
    def _compute_shard(
        self,
        shard: Shard,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        independent: bool,
        barrier: threading.Barrier | None,
        timing: Timing,
    ) -> Outcome:
        started = time.perf_counter_ns()
        token_ids, positions = token_ids[shard.start : shard.end], positions[shard.start : shard.end]
        if independent and self._fused is not None:
            hidden = self._fused(token_ids, positions, shard.attention)
        else:
            wait = (lambda: None) if barrier is None else barrier.wait
            attention = self._attention.step(shard.attention, wait)
            hidden = self.model(token_ids, positions, attention)
        timing.forward = time.perf_counter_ns() - started
        scored = self._score(shard, hidden)
        sampled = self._sample(shard, hidden)
        if len(sampled.slots) or scored:
            timing.sample = time.perf_counter_ns() - started - timing.forward
        return sampled, scored

    def _score(self, shard: Shard, hidden: torch.Tensor) -> list[ScoredTokens]:
        """Score prompt tokens by the shard's ``hidden [tokens, hidden_size]``."""
        return [score(hidden, self.model.logits, each, self._slots, self.limits.vocab_size) for each in shard.scores]

    def _sample(self, shard: Shard, hidden: torch.Tensor) -> Sampled:
        """Sample tokens from the shard's ``hidden [tokens, hidden_size]``."""
        if len(shard.sample_slots) == 0:
            return NOTHING_SAMPLED
        if len(shard.sample_slots) < hidden.shape[0]:
            hidden = hidden[torch.from_numpy(shard.sample_tokens).to(self._device)]
        return sample(
            hidden,
            self.model.logits,
            shard.sample_slots,
            shard.sample_positions,
            self._slots,
            self.limits.vocab_size,
            self.cache.tokens,
            self._masks(shard.sample_slots),
        )

    def _masks(self, slots: np.ndarray) -> RowMasks | None:
        """Return the grammar masks of rows that sample for ``slots [samples]``. Mark slots with failed grammars."""
        if self._grammars is None or not self._slots.masked[slots].any():
            return None
        masks = self._grammars.masks(slots)
        self._slots.failed[list(self._grammars.failures(slots))] = True
        return masks

    def _failures(self, sampled: Sampled) -> dict[int, Failure]:
        """Return the failures of grammars by slot."""
        if self._grammars is None or sampled.finite.all():
            return {}
        return self._grammars.failures(sampled.slots[~sampled.finite])

    def _keep_sampled(self, sampled: Sampled) -> torch.Tensor:
        """Keep the sampled tokens as the slots' last tokens. Return them, ``[samples]`` int64 on the device."""
        # A failed row continues with token 0, so that plans in flight stay valid. It fails until it is released.
        tokens = np.where(sampled.finite, sampled.token_ids, 0)
        self._slots.failed[sampled.slots] = ~sampled.finite
        if self._grammars is not None:
            self._grammars.consume(sampled.slots, np.where(sampled.finite, tokens, -1))
        index = torch.from_numpy(sampled.slots).to(self._device)
        last = torch.from_numpy(tokens).to(self._device)
        self._slots.last_tokens[index] = last
        return last
