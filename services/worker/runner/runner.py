"""The runner of a rank on CPUs, which checks and applies a plan, computes, samples and advances the slots.

Every rank of a replica receives the same plans; see ``runner/peers.py``.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from services.common.plan.result import ScoredTokens, Timing
from services.common.plan.routed_experts import RoutedExperts
from services.common.plan.rules import check_plan
from services.common.plan.types import Batch, LastPlan, Plan, WorkerLimits, micro_batches
from services.worker.attention.base import AttentionBackend
from services.worker.attention.kv_cache import KvCache
from services.worker.models.base import RankModel
from services.worker.parallel.errors import ParallelError
from services.worker.runner.inputs import Shard, StepInputs, build
from services.worker.runner.peers import Peers
from services.worker.runner.routed_experts import ExpertRecorder, find_routed
from services.worker.runner.shards import ShardThreads
from services.worker.sampling.grammars import RowMasks, SlotGrammars
from services.worker.sampling.prompt_logprobs import score
from services.worker.sampling.sampler import PlainSampler, sample
from services.worker.step.output import NOTHING_SAMPLED, Failure, Sampled, StepOutput
from services.worker.step.slots import SlotTable

if TYPE_CHECKING:
    from services.worker.models.fused_cpu import FusedDecoder  # loads numba, which CUDA does not need

Entering = tuple[torch.Tensor, torch.Tensor]  # token ids ``[tokens]`` or hidden states of a stage, and positions
Outcome = tuple[Sampled, list[ScoredTokens]]  # of a shard or micro-batch
# Least rows per thread of a decode step for which each thread computes its own rows. With as many, steps are slower if
# threads share the head.
_MANY_ROWS = 16


class StepRunner:
    """A runner for one rank on CPUs. Owns the slots and the cache. Only the compute thread calls it.

    ``run`` returns when this rank's part of a step is done. Later stages may still compute theirs. Only the output of
    the rank that reports has tokens.
    """

    def __init__(
        self,
        model: RankModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: WorkerLimits,
        threads: ShardThreads,
        fused: "FusedDecoder | None" = None,
        grammars: SlotGrammars | None = None,
        peers: Peers | None = None,
        recorder: ExpertRecorder | None = None,
        mask_words: int = 0,
    ) -> None:
        """``fused`` runs decode steps instead of ``model``.

        ``grammars``: None = grammars are not supported, or another rank reports. ``mask_words``: number of 32-bit words
        of a mask; 0 = grammars are not supported.

        ``peers``: None = one rank. Several ranks need one thread each, since all must call their collectives in the
        same order. ``recorder``: None = results carry no experts. It needs one thread.
        """
        self.limits = limits
        self.model, self.cache, self._attention, self._threads = model, cache, attention, threads
        self._fused, self._grammars, self._mask_words = fused, grammars, mask_words
        self._device = model.device
        self._slots = SlotTable(limits, self._device)
        self._peers, self._recorder = peers or Peers(), recorder
        self._peers.receive_into(self._slots.last_tokens)
        self._last = LastPlan()
        self._parts: list[Batch] = []  # micro-batches of the last batch
        self._barriers = {size: threading.Barrier(size) for size in range(2, threads.size + 1)}

    def reset(self) -> None:
        """Free every slot and expect step 1 next. Pages keep their content, which is unreachable.

        All ranks run the same steps before they reset, so that all messages arrive.
        """
        self._peers.drain()
        self._slots.clear()
        if self._grammars is not None:
            self._grammars.clear()
        self._last, self._parts = LastPlan(), []
        for barrier in self._barriers.values():
            barrier.reset()

    def weights_changed(self) -> None:
        """Refresh the copies that the fused decoder has."""
        if self._fused is not None:
            self._fused.copy_vectors()

    def close(self) -> None:
        """End the threads, and close the connections to other ranks."""
        self._threads.close()
        if self._grammars is not None:
            self._grammars.close()
        self._peers.close()

    def start(self, plan: Plan) -> StepOutput:
        """Run a step to its end. See ``run``."""
        return self.run(plan)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepOutput:
        """Run a step and return its output.

        Raises ``InvalidRequest`` or ``FailedPrecondition`` for a plan that breaks the contract, on all ranks alike and
        without changing anything, and ``ParallelError`` if a replica of several ranks cannot continue.
        """
        started = time.perf_counter_ns()
        check_plan(plan, self._last, self._slots, self.limits)
        try:
            return self._run(plan, started)
        except ParallelError:
            raise
        except Exception as error:
            if self._peers.alone:
                raise
            # The other ranks wait for this one, so the replica cannot continue.
            raise ParallelError(f"step {plan.step} failed on {self._peers.name}: {error}") from error

    def _run(self, plan: Plan, started: int) -> StepOutput:
        """Run a valid plan, which arrived at ``started`` of ``time.perf_counter_ns``."""
        self._apply(plan)
        timing = Timing()
        outcomes: list[Outcome] = []
        routed: list[RoutedExperts | None] = []
        for part in self._parts:
            outcomes.append(self._run_part(part, timing, started, routed))
            started = time.perf_counter_ns()
        if not (outcomes and self._peers.reports):
            return StepOutput(plan.step, NOTHING_SAMPLED, timing)
        sampled, scored = _joined(outcomes)
        failures = self._failures(sampled)
        return StepOutput(plan.step, sampled, timing, tuple(scored), failures, RoutedExperts.join(routed))

    def _run_part(self, part: Batch, timing: Timing, started: int, routed: list[RoutedExperts | None]) -> Outcome:
        """Run a micro-batch, whose preparation began at ``started``, and add its times to ``timing``.

        Append its experts to ``routed``.
        """
        inputs = build(part, self._slots, self._threads.size)
        received = self._peers.receive(len(inputs.positions), part.slots, self._slots, len(self._parts))
        entering = None if inputs.independent and self._fused is not None else self._enter(inputs, received)
        timing.prepare += time.perf_counter_ns() - started
        sampled, scored = _joined(self._compute(inputs, entering, timing))
        if self._recorder is not None:
            self._recorder.store(self._cache_indices(inputs))
            runs = find_routed(part.slots, part.token_counts, self._slots) if self._peers.reports else None
            if runs is not None:
                routed.append(runs.with_experts(self._recorder.gather(torch.from_numpy(runs.indices))))
        if self.model.last:
            self._peers.send_tokens(self._keep_sampled(sampled))
        sampled_slots = sampled.slots if self.model.last else inputs.shards[0].sample_slots
        self._slots.advance(part.slots, part.token_counts, sampled_slots)
        return sampled, scored

    def _apply(self, plan: Plan) -> None:
        slots = self._slots
        self._last = self._last.followed_by(plan)
        if plan.batch is not None:
            self._parts = micro_batches(plan.batch, plan.micro_batch_rows)
        if plan.releases.size:
            slots.release(plan.releases)
        slots.admit_all(plan.admissions)
        if self._grammars is not None:
            self._grammars.apply(plan)
        if plan.append_slots.size:
            slots.append_pages(plan.append_slots, plan.append_pages)
        if plan.copy_sources.size:
            pages = (torch.from_numpy(array).to(self._device) for array in (plan.copy_sources, plan.copy_targets))
            self.cache.copy_pages(*pages)

    def _enter(self, inputs: StepInputs, received: torch.Tensor | None) -> Entering:
        """Return the inputs of the model, and store the token ids in the cache if this stage is the last one.

        ``received`` are the hidden states of the previous stage, or None on the first stage.
        """
        token_ids, positions = self._to_device(inputs)
        if self.model.last:
            self._keep_tokens(inputs, token_ids)
        return token_ids if received is None else received, positions

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
        self.cache.tokens.view(-1)[self._cache_indices(inputs)] = token_ids.int()

    def _cache_indices(self, inputs: StepInputs) -> torch.Tensor:
        """Return the indices of the step's tokens in the cache, ``[tokens]`` int64."""
        slots = np.concatenate([shard.attention.token_slots for shard in inputs.shards])
        return torch.from_numpy(self._slots.cache_indices(slots, inputs.positions)).to(self._device)

    def _compute(self, inputs: StepInputs, entering: Entering | None, timing: Timing) -> list[Outcome]:
        """Run the shards. ``entering``: None = the fused decoder runs, which reads the last tokens itself."""
        if entering is None:
            return self._decode(inputs, timing)
        barrier = None if inputs.independent else self._barriers.get(len(inputs.shards))
        return self._run_shards(partial(self._compute_shard, entering, barrier), inputs, timing, barrier)

    def _run_shards(
        self,
        compute: Callable[[Shard, Timing], Outcome],
        inputs: StepInputs,
        timing: Timing,
        barrier: threading.Barrier | None = None,
    ) -> list[Outcome]:
        timings = [timing, *(Timing() for _ in inputs.shards[1:])]  # that of the first shard is the step's
        jobs = [partial(compute, shard, each) for shard, each in zip(inputs.shards, timings, strict=True)]
        return self._threads.run(jobs, barrier)

    def _decode(self, inputs: StepInputs, timing: Timing) -> list[Outcome]:
        """Run a step whose rows all decode.

        The threads share the work of the fused decoder and of its head. If each thread has at least ``_MANY_ROWS``
        rows, it computes its own rows.
        """
        if len(inputs.positions) >= _MANY_ROWS * self._threads.size:
            return self._run_shards(partial(self._decode_shard, inputs), inputs, timing)
        fused, table = cast("FusedDecoder", self._fused), self._slots
        slots, sampled = inputs.last_slots, inputs.positions + 1
        started = time.perf_counter_ns()
        hidden = fused(table.last_tokens, slots, inputs.positions, table.page_table, self._threads)
        forwarded = time.perf_counter_ns()
        timing.forward += forwarded - started
        if fused.plain_head is not None and table.are_plain(slots, sampled):
            outcomes = [self._sample(hidden, slots, sampled, partial(fused.plain_head, team=self._threads))]
        else:
            jobs = [partial(self._sample_shard, shard, hidden[shard.start : shard.end]) for shard in inputs.shards]
            outcomes = self._threads.run(jobs)
        timing.sample += time.perf_counter_ns() - forwarded
        return [(each, []) for each in outcomes]

    def _decode_shard(self, inputs: StepInputs, shard: Shard, timing: Timing) -> Outcome:
        """Run the shard of a step whose rows all decode."""
        fused, table, rows = cast("FusedDecoder", self._fused), self._slots, slice(shard.start, shard.end)
        started = time.perf_counter_ns()
        hidden = fused(table.last_tokens, inputs.last_slots[rows], inputs.positions[rows], table.page_table)
        forwarded = time.perf_counter_ns()
        timing.forward += forwarded - started
        sampled = self._sample_shard(shard, hidden)
        timing.sample += time.perf_counter_ns() - forwarded
        return sampled, []

    @torch.inference_mode()
    def _compute_shard(
        self, entering: Entering, barrier: threading.Barrier | None, shard: Shard, timing: Timing
    ) -> Outcome:
        started = time.perf_counter_ns()
        inputs, positions = (tensor[shard.start : shard.end] for tensor in entering)
        wait = (lambda: None) if barrier is None else barrier.wait
        attention = self._attention.step(shard.attention, wait)
        keep = self._kept(shard)
        hidden = self.model(inputs, positions, attention, keep, self._peers.exchange(len(positions)))
        forwarded = time.perf_counter_ns()
        timing.forward += forwarded - started
        if not self.model.last:
            self._peers.send_hidden(hidden, shard.sample_slots)
            return NOTHING_SAMPLED, []
        scored = self._score(shard, hidden)
        sampled = self._sample_shard(shard, hidden)
        if len(sampled.slots) or scored:
            timing.sample += time.perf_counter_ns() - forwarded
        return sampled, scored

    def _kept(self, shard: Shard) -> torch.Tensor | None:
        """Return the tokens that the last layer continues with, at least one, or None for all tokens.

        These are the sampled tokens. Scores and the load of experts need all tokens, and the warm-up compiles no graph
        for a selection.
        """
        if not self._peers.alone or self.model.compiled or self.model.local.experts or shard.scores:
            return None
        kept = shard.sample_tokens if len(shard.sample_tokens) else np.zeros(1, np.int64)
        return None if len(kept) == shard.end - shard.start else torch.from_numpy(kept).to(self._device)

    def _score(self, shard: Shard, hidden: torch.Tensor) -> list[ScoredTokens]:
        """Score prompt tokens by the shard's ``hidden [tokens, hidden_size]``."""
        return [score(hidden, self.model.logits, each, self._slots, self.limits.vocab_size) for each in shard.scores]

    def _sample_shard(self, shard: Shard, hidden: torch.Tensor) -> Sampled:
        """Sample tokens from ``hidden``, which has all tokens of the shard or only the sampled ones."""
        if len(shard.sample_slots) == 0:
            return NOTHING_SAMPLED
        if len(shard.sample_slots) < hidden.shape[0]:  # otherwise the model returned the sampled tokens only
            hidden = hidden[torch.from_numpy(shard.sample_tokens).to(self._device)]
        plain = None if self._fused is None else self._fused.plain_head
        return self._sample(hidden, shard.sample_slots, shard.sample_positions, plain)

    @torch.inference_mode()
    def _sample(
        self, hidden: torch.Tensor, slots: np.ndarray, positions: np.ndarray, plain: PlainSampler | None
    ) -> Sampled:
        """Sample a token for each row of ``hidden``, with the arguments of ``sample``."""
        vocab, tokens, masks = self.limits.vocab_size, self.cache.tokens, self._masks(slots)
        return sample(hidden, self.model.logits, slots, positions, self._slots, vocab, tokens, masks, plain)

    def _masks(self, slots: np.ndarray) -> RowMasks | None:
        """Return the grammar masks of rows that sample for ``slots [samples]``. Mark slots with failed grammars.

        All ranks of the stage get the same masks: the other ranks add zeros to those of the reporting rank.
        """
        rows = np.flatnonzero(self._slots.masked[slots])
        if not len(rows):
            return None
        if self._grammars is None:
            bits = np.zeros((len(rows), self._mask_words), np.int32)
        else:
            bits = self._grammars.masks(slots[rows])
            self._slots.failed[list(self._grammars.failures(slots[rows]))] = True
        return RowMasks(rows, self._peers.exchange(1).total(torch.from_numpy(bits)).numpy())

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


def _joined(outcomes: list[Outcome]) -> Outcome:
    """Return the outcome of consecutive shards or micro-batches, at least one."""
    if len(outcomes) == 1:
        return outcomes[0]
    parts, scored = zip(*outcomes, strict=True)
    return Sampled.join(parts), [each for part in scored for each in part]
