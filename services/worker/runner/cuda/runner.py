"""Runs plans on a GPU: the host prepares a step while the device computes the ones before, and waits for none.

As one of several ranks it gets the same plans as the others and keeps the same state on the host.
"""

import contextlib
import gc
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.attention.cuda import CudaAttention, CudaBatch
from services.worker.attention.kv_cache import KvCache
from services.worker.parallel.errors import ParallelError
from services.worker.runner.base import DeviceLost
from services.worker.runner.cuda.block import append, fill_in, fill_in_groups
from services.worker.runner.cuda.download import to_host
from services.worker.runner.cuda.graphs import DecodeGraph, DecodeGraphs, Forward
from services.worker.runner.cuda.guide import Guide
from services.worker.runner.cuda.inputs import Standing, StepArrays, build, fill_up, padded, standing
from services.worker.runner.cuda.peers import NoPeers, Peers
from services.worker.runner.cuda.pieces import StepPieces
from services.worker.runner.cuda.ring import Place, Ring
from services.worker.runner.cuda.scores import PromptRuns, StepScores, find_runs
from services.worker.runner.cuda.state import NO_CHANGES, DeviceState, PageChanges, Updates
from services.worker.runner.cuda.state_kernels import advance, gather_inputs
from services.worker.runner.cuda.step import CudaStep, CutStep, Era
from services.worker.sampling.fused import FusedSampler
from services.worker.sampling.grammars import SlotGrammars
from services.worker.sampling.rows import SampleRows
from services.worker.step.checks import check_plan
from services.worker.step.plan import NO_GROUPS, NO_ROWS, Batch, Failure, Groups, Limits, Plan, StepOutput
from services.worker.step.slots import SlotTable

if TYPE_CHECKING:
    from services.worker.models.skinny_cuda import SkinnyDecoder

# So few rows or bytes are sent on the stream of the kernels: the device loses less than the host would.
_SHORT_ROWS = 64
_SHORT_UPLOAD = 16 * 1024
_NOBODY = np.empty(0, np.int64)


class CudaRunner:
    """Owns the slots, the cache and the device's stream. One thread, the compute thread, calls all of it.

    ``start`` returns as soon as the step is launched. Lengths never depend on what is sampled, so the state on the host
    goes on at once; only the sampled tokens stay on the device, where the next step finds them.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KvCache,
        attention: CudaAttention,
        sampler: FusedSampler | None,
        state: DeviceState,
        limits: Limits,
        peers: Peers | None = None,
        grammars: SlotGrammars | None = None,
    ) -> None:
        """``sampler``: None on a stage that does not sample. ``peers``: None = one rank. ``grammars``: None where
        sequences have none, or nothing is sampled here."""
        self.limits = limits
        self._forward, self._cache, self._attention = forward, cache, attention
        self._sampler: FusedSampler = sampler  # type: ignore[assignment]  # None where nobody asks for it
        self._device = cache.all_keys.device
        self._slots = SlotTable(limits, torch.device("cpu"))
        self._state = state
        self._peers = peers or NoPeers()
        self.grain = self._peers.grain  # of which the tokens of a forward pass are a multiple
        self._peers.keep_in(state.last_tokens)
        with torch.inference_mode():  # as all that a model is called with: compilers tell such tensors from others
            self._ring = Ring(limits, self._device)
        # Two, or what a step sends back would hold up what the next one needs.
        self._uploads, self._downloads = torch.cuda.Stream(), torch.cuda.Stream()
        self._graphs: DecodeGraphs | None = None
        self._pieces: StepPieces | None = None
        # None where no sequence has a grammar: it is looked for before it is asked.
        self._guide: Guide = None if grammars is None else Guide(grammars, self._sampler.masks)  # type: ignore[assignment]
        self._begin_anew()

    @torch.inference_mode()
    def capture(self, largest: int, skinny: "SkinnyDecoder | None" = None, pieces: int = 0) -> None:
        """Make CUDA graphs of decode steps with up to ``largest`` rows; ``skinny``: what is faster for few. And of what
        is between the attentions of all other steps of up to ``pieces`` tokens."""
        if pieces:
            self._pieces = StepPieces(self._forward, self._attention, self._peers, pieces, self._device)
        parts = self._forward, skinny, self._cache, self._attention, self._sampler, self._state, self._slots
        self._graphs = DecodeGraphs(*parts, self._ring, min(largest, self.limits.max_slots), self._peers)

    @torch.inference_mode()
    def reset(self) -> None:
        """Free every slot and expect step 1 next. Pages keep their content, which nobody refers to any more. All ranks
        run the same steps before they reset."""
        self._peers.forget()
        self._slots.clear()
        if self._guide is not None:
            self._guide.clear()
        self._ring.forget_last()
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._step, self._era = 0, Era(self.limits.max_slots)
        # What was said last, and the micro-batches that it makes.
        self._batch: Batch = NO_ROWS
        self._groups: Groups = NO_GROUPS
        self._cut: tuple[int, ...] = ()
        self._parts: list[Standing] = []

    def close(self) -> None:
        """Wait for the device, and leave the other ranks."""
        torch.cuda.synchronize(self._device)
        # Connections wait for the end of the graphs that use them.
        self._graphs = self._pieces = None
        gc.collect()
        if self._guide is not None:
            self._guide.close()
        self._peers.close()

    def run(self, plan: Plan) -> StepOutput:
        """``start``, and wait for it."""
        output: StepOutput = self.start(plan).result()
        return output

    @torch.inference_mode()
    def start(self, plan: Plan) -> CudaStep | CutStep:
        """Launch a step. Raises ``InvalidRequest`` or ``FailedPrecondition``, having changed nothing, for a plan that
        breaks the contract, on all ranks alike; and ``ParallelError`` when this replica cannot go on."""
        began = time.perf_counter_ns()
        check_plan(plan, self._step, self._batch, self._groups, self._slots, self.limits, self._cut)
        places: list[Place] = []
        try:
            step = self._run(plan, places)
        except ParallelError:
            raise
        except BaseException as error:
            if isinstance(self._peers, Peers):  # the others wait for this rank, and it must not wait for them
                raise ParallelError(f"step {plan.step} failed on {self._peers.name}: {error}") from error
            try:
                for place in places:
                    place.abandon()
            except Exception as lost:
                raise DeviceLost(f"the device is lost: {lost}") from error
            raise
        step.timing.prepare = time.perf_counter_ns() - began
        return step

    def _run(self, plan: Plan, places: list[Place]) -> CudaStep | CutStep:
        """``places``: gets those that are taken."""
        changes = self._apply(plan)
        if not self._parts:
            return self._run_nothing(plan, self._next(places), changes)
        steps = []
        for part in self._parts:
            steps.append(self._run_part(plan, self._next(places), changes, part))
            plan, changes = _nothing_but_its_number(plan), NO_CHANGES
        return steps[0] if len(steps) == 1 else CutStep(plan.step, steps)

    def _next(self, places: list[Place]) -> Place:
        places.append(self._ring.next())
        if self._guide is not None:
            self._guide.catch_up(places[-1])
        return places[-1]

    def _piece(self, tokens: int) -> int | None:
        """The size of the graphs between attentions of ``tokens`` tokens, where there are such."""
        return None if self._pieces is None else self._pieces.find(tokens)

    def _padded(self, part: Standing) -> tuple[int, bool]:
        """To how many tokens; whether there are graphs between attentions of so many."""
        tokens = int(part.batch.token_counts.sum())
        size = self._piece(tokens)
        return (padded(tokens, self.grain), False) if size is None else (size, True)

    def _run_part(self, plan: Plan, place: Place, changes: PageChanges, part: Standing) -> CudaStep:
        slots, rows, counts = self._slots, part.batch.slots, part.batch.token_counts
        if (graph := self._find_graph(part)) is not None:
            step = self._replay(plan, place, changes, part, graph)
            slots.advance(rows, counts, rows)
            return step
        arrays = build(part.batch, part.groups, slots, self.limits.page_size)
        step = self._launch(plan, place, changes, part, arrays)
        slots.advance(rows, counts, arrays.sample_slots)
        return step

    def _apply(self, plan: Plan) -> PageChanges:
        """Make the plan's changes on the host; returns those that the device must make."""
        slots, parts = self._slots, []
        self._step = plan.step
        if plan.releases.size:
            slots.release(plan.releases)
        for admission in plan.admissions:
            slots.admit(admission)
            count = len(admission.pages)
            parts.append(PageChanges(np.full(count, admission.slot), np.arange(count), admission.pages))
        if self._guide is not None:
            self._guide.apply(plan)
        if plan.admissions:
            slots.derive(np.array([admission.slot for admission in plan.admissions]))
        if plan.append_slots.size:
            places = slots.append_pages(plan.append_slots, plan.append_pages)
            parts.append(PageChanges(plan.append_slots, places, plan.append_pages))
        if plan.batch is not None or plan.groups is not None:
            if plan.batch is not None:
                self._batch, self._cut = plan.batch, plan.micro_batch_rows
            self._groups = self._groups if plan.groups is None else plan.groups
            groups = self._groups if self._attention.shares_prefixes else NO_GROUPS
            self._parts = standing(self._batch, groups, self._cut, self.limits.page_size)
        return PageChanges.joined(parts)

    def _run_nothing(self, plan: Plan, place: Place, changes: PageChanges) -> CudaStep:
        """A step without a batch."""
        updates = self._updates(plan, place, changes)
        self._upload(place)
        place.started.record()
        updates.apply(self._state, self._cache)
        place.begin_sampling()
        return self._finish(plan, place, None, None, None)

    def _find_graph(self, part: Standing) -> DecodeGraph | None:
        """What runs ``part``; None where one of its rows computes several tokens or does not sample, and where nothing
        was captured for so many."""
        if self._graphs is None or not part.singles:
            return None
        rows = part.batch.slots
        begins = self._slots.computed[rows]
        if (begins + 1 != self._slots.known[rows]).any():
            return None
        return self._graphs.find(len(rows), int(begins.max()) + 1, part.spans, self._piece(len(rows)) is not None)

    def _replay(self, plan: Plan, place: Place, changes: PageChanges, part: Standing, graph: DecodeGraph) -> CudaStep:
        """A micro-batch through a graph."""
        rows, fields, peers = part.batch.slots, graph.fields(place.index), self._peers
        begins = self._slots.computed[rows]
        fill_in(fields, place.index * self.limits.max_slots, rows, begins, self._slots)
        if graph.grouped:
            fill_in_groups(fields, part.prefix_tokens, self._graphs.tiles(part.spans))  # type: ignore[union-attr, arg-type]  # ``graph`` is of there
        updates = self._updates(plan, place, NO_CHANGES if append(fields, changes) else changes)
        plain, sample_rows = not peers.last or self._slots.are_plain(rows, begins + 1), None
        if not plain:
            sample_rows = self._sampler.prepare(self._slots, rows, begins + 1, place.upload.put, graph.size)
        self._upload(place)
        graph.send(place.index)
        entering = self._enter(place, part, graph.size)
        updates.apply(self._state, self._cache)
        if entering is not None:
            graph.enter(entering)
        if not peers.last:  # what leaves is written over by the next step
            return self._hand_on(plan, place, graph.run().clone(), rows)
        if plain:
            graph.run_whole()
            if not peers.first:
                peers.tell(graph.token_ids[: len(rows)].clone())
            place.end(long=len(rows) > _SHORT_ROWS or not peers.reports)
            return CudaStep(plan, place, self._era, rows if peers.reports else _NOBODY)
        hidden = graph.run()
        place.begin_sampling()
        return self._finish(plan, place, hidden, sample_rows, graph.inputs.slots)

    def _launch(self, plan: Plan, place: Place, changes: PageChanges, part: Standing, arrays: StepArrays) -> CudaStep:
        """A micro-batch kernel by kernel, or its attentions, and graphs between them."""
        updates, put = self._updates(plan, place, changes), place.upload.put
        tokens, pieced = self._padded(part)
        slots, positions, known = (
            put(fill_up(array, tokens, filler))
            for array, filler in ((arrays.token_slots, -1), (arrays.positions, 0), (arrays.known, -1))
        )
        decodes = arrays.decodes if arrays.chunks is not None else tokens
        prefix = None if arrays.prefix_tokens is None else put(fill_up(arrays.prefix_tokens, decodes))
        rows = sample_slots = keep = runs = scores = None
        if self._peers.last:
            runs = find_runs(part.batch, self._slots)
            rows, sample_slots, keep = self._prepare_sampling(arrays, slots, put, runs)
            targets = None if runs is None else put(runs.token_ids)
        batch = CudaBatch(
            slots, positions, self._state.page_table, decodes, arrays.longest, arrays.chunks, arrays.groups, prefix
        )
        attention = self._attention.prepare(batch, self._slots.page_table, put)
        self._upload(place)
        entering = self._enter(place, part, tokens)
        updates.apply(self._state, self._cache)
        token_ids = gather_inputs(
            known, slots, positions, self._state.last_tokens, self._state.page_table, self._cache.tokens
        )
        entering = token_ids if entering is None else entering
        if pieced:
            leaving = self._pieces.run(tokens, entering, attention, keep)  # type: ignore[union-attr]  # they are of there
        else:
            active = self._attention.active(attention)
            leaving = self._forward(entering, positions, active, keep, self._peers.exchange(tokens))
        if not self._peers.last:
            return self._hand_on(plan, place, leaving.clone() if pieced else leaving, arrays.sample_slots)
        place.begin_sampling()
        if runs is not None:
            scored = leaving[len(arrays.sample_slots) :]
            scores = StepScores(runs.runs, self._sampler.score(scored, targets, runs.widest))  # type: ignore[arg-type]
        return self._finish(plan, place, leaving, rows, sample_slots, arrays.batch_order, scores)

    def _enter(self, place: Place, part: Standing, tokens: int) -> torch.Tensor | None:
        """What the stage before handed on, of ``tokens`` with the padding; None where there is none. The device begins
        when it is there."""
        entering = self._peers.enter(tokens, part.batch.slots, self._slots, len(self._parts))
        place.started.record()
        return entering

    def _hand_on(self, plan: Plan, place: Place, leaving: torch.Tensor, sample_slots: np.ndarray) -> CudaStep:
        """``leaving``, which nothing else writes to, to the next stage."""
        place.end(long=True)
        self._peers.hand_on(leaving, sample_slots)
        return CudaStep(plan, place, self._era, _NOBODY)

    def _updates(self, plan: Plan, place: Place, changes: PageChanges) -> Updates:
        return Updates.put(changes, plan, self.limits.max_pages_per_slot, place.upload.put)

    def _prepare_sampling(
        self,
        arrays: StepArrays,
        token_slots: torch.Tensor,
        put: Callable[[np.ndarray], torch.Tensor],
        runs: PromptRuns | None,
    ) -> tuple[SampleRows | None, torch.Tensor | None, torch.Tensor | None]:
        """Settings of the rows that sample, their slots on the device, and which tokens they are (None = all), those of
        ``runs`` behind them."""
        keep = arrays.keep if runs is None else np.concatenate([arrays.keep, runs.tokens])
        if len(arrays.sample_slots) == 0:
            return None, None, put(np.zeros(padded(1), np.int32) if runs is None else fill_up(keep, padded(len(keep))))  # type: ignore[arg-type]
        rows = self._sampler.prepare(self._slots, arrays.sample_slots, arrays.sample_positions, put)
        if keep is None:
            return rows, token_slots, None
        return rows, put(arrays.sample_slots.astype(np.int32)), put(fill_up(keep, padded(len(keep))))

    def _finish(
        self,
        plan: Plan,
        place: Place,
        hidden: torch.Tensor | None,
        rows: SampleRows | None,
        sample_slots: torch.Tensor | None,
        order: np.ndarray | None = None,
        scores: StepScores | None = None,
    ) -> CudaStep:
        """Sample; keep the tokens for the next step, and send them to the host behind the device's back."""
        peers = self._peers
        if rows is None and scores is None:
            place.end(long=not peers.reports)
            return CudaStep(plan, place, self._era, _NOBODY)
        extras: tuple[torch.Tensor | None, ...]
        failures: dict[int, Failure]
        slots, extras, failures, guided = _NOBODY, (), {}, rows is not None and len(rows.masked) > 0
        if guided:
            failures = self._guide.write(rows.slots[rows.masked])  # type: ignore[union-attr]  # there are rows
        if rows is not None:
            slots, sampled = rows.slots, self._sampler.run(hidden, rows)  # type: ignore[arg-type]  # they are of ``hidden``
            token_ids, results = sampled.token_ids[: len(slots)], place.results[: len(slots)]
            advance(sampled.token_ids, sampled.finite, sample_slots[: len(slots)], self._state.last_tokens, results)  # type: ignore[index]
        if guided:
            self._guide.sent()
        place.end(long=not peers.reports)
        if rows is not None and not peers.first:
            peers.tell(token_ids)
        if not (peers.reports or guided):
            return CudaStep(plan, place, self._era, _NOBODY)
        short = max(len(slots), 0 if scores is None else len(scores)) <= _SHORT_ROWS
        with contextlib.nullcontext() if short else torch.cuda.stream(self._downloads):
            if not short:
                self._downloads.wait_event(place.ended)
            if rows is not None:
                place.host_results[: len(slots)].copy_(results, non_blocking=True)
                extras = tuple(to_host(tensor) for tensor in sampled[2:])
            scores = None if scores is None else scores.to_host()
            place.finished(long=not short)
        if guided:
            self._guide.expect(place, rows.slots[rows.masked], rows.masked)  # type: ignore[union-attr]  # as above
        if not peers.reports:
            return CudaStep(plan, place, self._era, _NOBODY)
        return CudaStep(plan, place, self._era, slots, rows, extras, order, scores, failures)

    def _upload(self, place: Place) -> None:
        """Send what was put; what is launched from here on finds it."""
        if place.upload.used <= _SHORT_UPLOAD:
            place.upload.send()
            return
        with torch.cuda.stream(self._uploads):
            place.upload.send()
            place.uploaded.record()
        torch.cuda.current_stream().wait_event(place.uploaded)


def _nothing_but_its_number(plan: Plan) -> Plan:
    """For the parts of a step behind the first, which makes the changes."""
    return Plan(plan.step, _NOBODY, (), _NOBODY, _NOBODY, _NOBODY, _NOBODY, None)
