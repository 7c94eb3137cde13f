"""The runner of one of several ranks on CPUs: its layers, its heads, and the messages to other ranks.

Every rank receives the same plans and keeps the same state on its host, because lengths do not depend on the sampled
tokens. So each rank can compute from a plan alone which messages the others send and receive.

A rank waits only for the ranks of its stage in a collective, for activations of this micro-batch from the previous
stage, for tokens of earlier micro-batches from the last stage, and for the next stage to follow within a few
micro-batches. Each of these waits depends only on the same micro-batch in an earlier stage or on an earlier
micro-batch, so ranks cannot deadlock.
"""

import time

import torch

from services.common.plan.result import Timing
from services.common.plan.rules import check_plan
from services.common.plan.types import Batch, Plan, WorkerLimits, micro_batches
from services.worker.attention.base import AttentionBackend
from services.worker.attention.kv_cache import KvCache
from services.worker.models.decoder import DecoderModel
from services.worker.parallel.channel import Sender
from services.worker.parallel.errors import ParallelError
from services.worker.parallel.exchange import Exchanges
from services.worker.parallel.group import RankGroup
from services.worker.parallel.owed import OwedTokens
from services.worker.runner.inputs import Shard, StepInputs, build
from services.worker.runner.runner import Outcome, StepRunner
from services.worker.runner.shards import ShardThreads
from services.worker.sampling.grammars import SlotGrammars
from services.worker.sampling.sampler import NOTHING_SAMPLED, concatenate
from services.worker.step.output import StepOutput


class StageRunner(StepRunner):
    """A ``StepRunner`` with one thread, since all ranks must call their collectives in the same order.

    ``run`` returns when this rank's part of a step is done. Later stages may still compute theirs. Only the output of
    the rank that reports has tokens.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        attention: AttentionBackend,
        limits: WorkerLimits,
        group: RankGroup,
        exchanges: Exchanges,
        grammars: SlotGrammars | None = None,
    ) -> None:
        super().__init__(model, cache, attention, limits, ShardThreads(1), grammars=grammars)
        self._group, self._exchanges = group, exchanges
        self._parts: list[Batch] = []  # micro-batches of the current batch
        self._owed = None if group.tokens_in is None else OwedTokens(group.tokens_in, self._slots.last_tokens)

    def reset(self) -> None:
        """Free every slot after all messages have arrived. All ranks run the same steps before they reset."""
        if self._owed is not None:
            self._owed.drain()
        self._group.drain()
        super().reset()
        self._parts = []

    def close(self) -> None:
        """End the threads and close the connections to other ranks."""
        super().close()
        self._group.close()

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepOutput:
        """Run this rank's part of a step.

        Raises the errors of ``StepRunner.run``, on all ranks alike, and ``ParallelError`` if the replica cannot go on.
        """
        started = time.perf_counter_ns()
        check_plan(plan, self._last, self._slots, self.limits)
        try:
            return self._run_checked(plan, started)
        except ParallelError:
            raise
        except Exception as error:
            # The other ranks wait for this one, so the replica cannot continue.
            raise ParallelError(f"step {plan.step} failed on {self._group.ranks.name()}: {error}") from error

    def _run_checked(self, plan: Plan, started: int) -> StepOutput:
        self._apply(plan)
        if plan.batch is not None:
            self._parts = micro_batches(plan.batch, plan.micro_batch_rows)
        parts = [(part, build(part, self._slots, threads=1)) for part in self._parts]
        timing = Timing(prepare=time.perf_counter_ns() - started)
        outcomes = [self._run_part(part, inputs, timing) for part, inputs in parts]
        if not self._group.ranks.reports:
            return StepOutput(plan.step, NOTHING_SAMPLED, timing)
        sampled = [each for each, _ in outcomes if len(each.slots)]
        scored = tuple(each for _, found in outcomes for each in found)
        merged = concatenate(sampled) if sampled else NOTHING_SAMPLED
        return StepOutput(plan.step, merged, timing, scored, self._failures(merged))

    def _run_part(self, part: Batch, inputs: StepInputs, timing: Timing) -> Outcome:
        """Run a micro-batch, and add its times to ``timing``."""
        started = time.perf_counter_ns()
        model, (shard,) = self.model, inputs.shards
        if self._owed is not None:
            self._owed.settle(inputs.last_slots, len(self._parts))
        token_ids, positions = self._to_device(inputs)
        if model.last:
            self._keep_tokens(inputs, token_ids)
        previous, following = self._group.from_previous, self._group.to_next
        exchange = self._exchanges.of(len(positions))
        shape = exchange.rows(len(positions)), model.config.hidden_size
        entering = token_ids if previous is None else previous.receive(shape, model.dtype)
        prepared = time.perf_counter_ns()
        attention = self._attention.step(shard.attention, lambda: None)
        leaving = model(entering, positions, attention, None, exchange)
        forwarded = time.perf_counter_ns()
        outcome = self._finish(leaving, shard) if following is None else self._send(following, leaving, shard)
        self._slots.advance(part.slots, part.token_counts, shard.sample_slots)
        timing.prepare += prepared - started
        timing.forward += forwarded - prepared
        timing.sample += time.perf_counter_ns() - forwarded
        return outcome

    def _send(self, following: Sender, leaving: torch.Tensor, shard: Shard) -> Outcome:
        """Send activations to the next stage. On the first stage, also expect the tokens that are sampled from them."""
        following.send(leaving)
        if self._owed is not None and len(shard.sample_slots):
            self._owed.expect(shard.sample_slots)
        return NOTHING_SAMPLED, []

    def _finish(self, hidden: torch.Tensor, shard: Shard) -> Outcome:
        """Score prompts, sample, and send the sampled tokens to the first stage."""
        scored = self._score(shard, hidden)
        sampled = self._sample(shard, hidden)
        if len(sampled.slots):
            last = self._keep_sampled(sampled)
            if self._group.tokens_out is not None:
                self._group.tokens_out.send(last)
        return sampled, scored
