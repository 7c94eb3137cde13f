"""The end of a step: sample on the last stage, send hidden states to the next stage on the others."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from services.common.plan.types import Plan
from services.worker.runner.cuda.graphs import DecodeGraph, WholeStep
from services.worker.runner.cuda.guide import Guide, NoGuide
from services.worker.runner.cuda.inputs import Standing, StepArrays, fill_up, padded
from services.worker.runner.cuda.ring import Place
from services.worker.runner.cuda.scores import PromptRuns, StepScores, find_runs
from services.worker.runner.cuda.state import DeviceState
from services.worker.runner.cuda.state_kernels import advance
from services.worker.runner.cuda.step import CudaStep, Era, StepRouted
from services.worker.runner.cuda.transfers import to_host
from services.worker.runner.peers import Peers
from services.worker.runner.routed_experts import ExpertRecorder, RoutedRuns, find_routed
from services.worker.sampling.fused import FusedSampler
from services.worker.sampling.grammars import SlotGrammars
from services.worker.sampling.outcome import SampledOnDevice
from services.worker.sampling.rows import SampleRows
from services.worker.step.output import Failure
from services.worker.step.slots import SlotTable

# Steps with more rows download their results on a separate stream. With fewer rows, the second stream takes the host
# more time than it saves on the device.
_SHORT_ROWS = 64
_NO_SLOTS = np.empty(0, np.int64)

Put = Callable[[np.ndarray], torch.Tensor]


class DrawnRows(NamedTuple):
    """The rows of a step that draw a token."""

    settings: SampleRows
    slots: torch.Tensor  # [rows or more] int32, on the device


class PendingScores(NamedTuple):
    """The prompt tokens of a step whose log-probabilities a request asks for."""

    runs: PromptRuns
    token_ids: torch.Tensor  # [tokens] int64, on the device


class PendingRouted(NamedTuple):
    """The tokens whose experts the result of a step carries."""

    runs: RoutedRuns
    indices: torch.Tensor  # ``runs.indices``, on the device


class KeptTokens(NamedTuple):
    """The tokens of a micro-batch that the last layer continues with."""

    tokens: torch.Tensor | None = None  # [kept] int32, on the device; None = all tokens
    runs: PromptRuns | None = None  # the scored ones, behind the sampled ones


class LaunchedPart(NamedTuple):
    """A micro-batch whose forward pass is launched, eagerly or as piecewise graphs."""

    part: Standing
    arrays: StepArrays
    token_slots: torch.Tensor  # [tokens or more] int32, on the device
    kept: KeptTokens


@dataclass(frozen=True)
class Samples:
    """The rows of a micro-batch that are sampled and scored."""

    slots: np.ndarray  # [samples] int64, in the order of the results
    order: np.ndarray | None = None  # [samples] int64, which sample is first, second, ... in the batch; None = as is
    drawn: DrawnRows | None = None
    scored: PendingScores | None = None  # behind the drawn rows
    routed: PendingRouted | None = None


class StepEnd(ABC):
    """The end of the micro-batches of one stage. Owned by the compute thread."""

    def __init__(self, peers: Peers, max_slots: int, guide: Guide | NoGuide | None = None) -> None:
        """``guide``: None if this rank writes no masks of grammars."""
        self._peers, self._max_slots, self.guide = peers, max_slots, guide or NoGuide()
        self._era = Era(max_slots)

    def keep(self, part: Standing, arrays: StepArrays, put: Put) -> KeptTokens:
        """Put the indices of the tokens that the last layer continues with into the upload, without a graph."""
        return KeptTokens()

    @abstractmethod
    def finish(
        self, plan: Plan, place: Place, leaving: torch.Tensor, launched: LaunchedPart, *, reused: bool
    ) -> CudaStep:
        """Launch the end of a step, after its forward pass.

        ``leaving [kept, hidden_size]`` is the output of the forward pass. ``reused``: the next step overwrites it. What
        only the end needs is prepared here, while the device computes the forward pass.
        """

    @abstractmethod
    def replay(self, plan: Plan, place: Place, graph: DecodeGraph, rows: np.ndarray, positions: np.ndarray) -> CudaStep:
        """Launch ``graph`` and the end of its step, of one token of each slot in ``rows``, at ``positions``."""

    def finish_empty(self, plan: Plan, place: Place) -> CudaStep:
        """End a step without a batch."""
        place.begin_sampling()
        place.end(long=not self._peers.reports)
        return self._step(plan, place)

    def reset(self) -> None:
        """Free every slot."""
        self.guide.clear()
        self._era = Era(self._max_slots)

    def _step(self, plan: Plan, place: Place, slots: np.ndarray = _NO_SLOTS) -> CudaStep:
        return CudaStep(plan, place, self._era, slots)


class SendingEnd(StepEnd):
    """The end of a step on every stage but the last: hidden states go to the next stage."""

    def finish(
        self, plan: Plan, place: Place, leaving: torch.Tensor, launched: LaunchedPart, *, reused: bool
    ) -> CudaStep:
        return self._send(plan, place, leaving.clone() if reused else leaving, launched.arrays.sample_slots)

    def replay(self, plan: Plan, place: Place, graph: DecodeGraph, rows: np.ndarray, positions: np.ndarray) -> CudaStep:
        return self._send(plan, place, graph.run().clone(), rows)

    def _send(self, plan: Plan, place: Place, leaving: torch.Tensor, slots: np.ndarray) -> CudaStep:
        place.end(long=True)
        self._peers.send_hidden(leaving, slots)
        return self._step(plan, place)


class SamplingEnd(StepEnd):
    """The end of a step on the last stage: tokens are sampled, kept for the next step, and copied to the host."""

    def __init__(
        self,
        sampler: FusedSampler,
        state: DeviceState,
        table: SlotTable,
        peers: Peers,
        grammars: SlotGrammars | None,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        """``grammars``: None if sequences have no grammars, or this rank does not report.

        ``recorder``: None if results carry no experts.
        """
        guide = None if grammars is None else Guide(grammars, sampler.masks)
        super().__init__(peers, len(state.last_tokens), guide)
        self._sampler, self._state, self._table, self._recorder = sampler, state, table, recorder
        self._downloads = torch.cuda.Stream()  # separate, so that a download does not delay uploads of the next step

    def keep(self, part: Standing, arrays: StepArrays, put: Put) -> KeptTokens:
        slots, keep, runs = arrays.sample_slots, arrays.keep, find_runs(part.batch, self._table)
        if runs is not None:
            keep = np.concatenate([np.arange(len(slots), dtype=np.int32) if keep is None else keep, runs.tokens])
        elif not len(slots):
            keep = np.zeros(padded(1), np.int32)  # the last layer needs a token to continue with
        return KeptTokens(None if keep is None else put(fill_up(keep, padded(len(keep)))), runs)

    def finish(
        self, plan: Plan, place: Place, leaving: torch.Tensor, launched: LaunchedPart, *, reused: bool
    ) -> CudaStep:
        place.begin_sampling()
        batch, arrays, (keep, runs) = launched.part.batch, launched.arrays, launched.kept
        slots, put, drawn = arrays.sample_slots, place.upload.put, None
        if len(slots):
            settings = self._sampler.prepare(self._table, slots, arrays.sample_positions, put)
            drawn = DrawnRows(settings, launched.token_slots if keep is None else put(slots.astype(np.int32)))
        scored = None if runs is None else PendingScores(runs, put(runs.token_ids))
        routed = self._find_routed(batch.slots, batch.token_counts, put)
        return self._finish(plan, place, leaving, Samples(slots, arrays.batch_order, drawn, scored, routed))

    def replay(self, plan: Plan, place: Place, graph: DecodeGraph, rows: np.ndarray, positions: np.ndarray) -> CudaStep:
        if graph.whole is not None and self._table.are_plain(rows, positions):
            return self._replay_whole(plan, place, graph.whole, rows)
        leaving, put = graph.run(), place.upload.put
        place.begin_sampling()
        drawn = DrawnRows(self._sampler.prepare(self._table, rows, positions, put, graph.size), graph.inputs.slots)
        routed = self._find_routed(rows, np.ones_like(rows), put)
        return self._finish(plan, place, leaving, Samples(rows, drawn=drawn, routed=routed))

    def _replay_whole(self, plan: Plan, place: Place, whole: WholeStep, rows: np.ndarray) -> CudaStep:
        peers = self._peers
        whole.replay()
        if not peers.first:
            peers.send_tokens(whole.token_ids[: len(rows)].clone())
        place.end(long=len(rows) > _SHORT_ROWS or not peers.reports)
        return self._step(plan, place, rows if peers.reports else _NO_SLOTS)

    def _find_routed(self, rows: np.ndarray, counts: np.ndarray, put: Put) -> PendingRouted | None:
        """Put the cache indices of the experts that the result carries into the upload."""
        runs = find_routed(rows, counts, self._table) if self._recorder is not None and self._peers.reports else None
        return None if runs is None else PendingRouted(runs, put(runs.indices))

    def _finish(self, plan: Plan, place: Place, leaving: torch.Tensor, samples: Samples) -> CudaStep:
        """Upload what was prepared, and launch the sampling."""
        place.send()
        peers, drawn = self._peers, samples.drawn
        scores = self._score(leaving, samples)
        sampled, failures = (None, {}) if drawn is None else self._sample(place, leaving, drawn)
        routed = self._gather(samples)
        place.end(long=not peers.reports)
        if sampled is not None and not peers.first:
            peers.send_tokens(sampled.token_ids[: len(samples.slots)])
        if (sampled is None and scores is None and routed is None) or not peers.reports:
            return self._step(plan, place)
        extras, scores, routed = self._download(place, samples.slots, sampled, scores, routed)
        settings, order = None if drawn is None else drawn.settings, samples.order
        if settings is not None and len(settings.masked):
            self.guide.expect(place, settings.slots[settings.masked], settings.masked)
        return CudaStep(plan, place, self._era, samples.slots, settings, extras, order, scores, failures, routed)

    def _gather(self, samples: Samples) -> StepRouted | None:
        """Launch the collection of the experts that the result carries."""
        if samples.routed is None or self._recorder is None:
            return None
        return StepRouted(samples.routed.runs, self._recorder.gather(samples.routed.indices))

    def _score(self, leaving: torch.Tensor, samples: Samples) -> StepScores | None:
        """Launch the log-probabilities of prompt tokens."""
        if samples.scored is None:
            return None
        runs, token_ids = samples.scored
        found = self._sampler.score(leaving[len(samples.slots) :], token_ids, runs.widest)
        return StepScores(runs.runs, found)

    def _sample(
        self, place: Place, leaving: torch.Tensor, drawn: DrawnRows
    ) -> tuple[SampledOnDevice, dict[int, Failure]]:
        """Launch the draws, and keep the tokens as the slots' last tokens. Also return failures of grammars by slot."""
        settings, count = drawn.settings, len(drawn.settings.slots)
        masked = settings.masked
        failures = self.guide.write(settings.slots[masked]) if len(masked) else {}
        sampled = self._sampler.run(leaving, settings)
        results = place.results[:count]
        advance(sampled.token_ids, sampled.finite, drawn.slots[:count], self._state.last_tokens, results)
        if len(masked):
            self.guide.sent()
        return sampled, failures

    def _download(
        self,
        place: Place,
        slots: np.ndarray,
        sampled: SampledOnDevice | None,
        scores: StepScores | None,
        routed: StepRouted | None,
    ) -> tuple[tuple[torch.Tensor | None, ...], StepScores | None, StepRouted | None]:
        """Launch the copies of results to the host. Return the copies of all results but the tokens."""
        tokens = 0 if routed is None else len(routed.experts)
        short = max(len(slots), tokens, 0 if scores is None else len(scores)) <= _SHORT_ROWS
        extras: tuple[torch.Tensor | None, ...] = ()
        with contextlib.nullcontext() if short else torch.cuda.stream(self._downloads):
            if not short:
                self._downloads.wait_event(place.ended)
            if sampled is not None:
                place.host_results[: len(slots)].copy_(place.results[: len(slots)], non_blocking=True)
                extras = tuple(None if each is None else to_host(each) for each in sampled[2:])
            found = None if scores is None else scores.to_host()
            experts = None if routed is None else StepRouted(routed.runs, to_host(routed.experts))
            place.finished(long=not short)
        return extras, found, experts
