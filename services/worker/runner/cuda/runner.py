"""The runner for GPUs: the host prepares a step while the device computes earlier steps.

Each rank of a replica receives the same plans and keeps the same state on its host.
"""

import gc
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from services.common.plan.rules import check_plan
from services.common.plan.types import NO_GROUPS, LastPlan, Plan, WorkerLimits
from services.worker.attention.cuda import CudaAttention, CudaBatch
from services.worker.attention.kv_cache import KvCache
from services.worker.parallel.errors import ParallelError
from services.worker.runner.base import DeviceLost
from services.worker.runner.cuda.block import append, fill_in, fill_in_groups
from services.worker.runner.cuda.eager import EagerSteps
from services.worker.runner.cuda.ending import LaunchedPart, SamplingEnd, SendingEnd, StepEnd
from services.worker.runner.cuda.graphs import DecodeGraphs, Forward, FoundGraph
from services.worker.runner.cuda.inputs import Standing, StepArrays, build, fill_up, split
from services.worker.runner.cuda.pieces import StepPieces
from services.worker.runner.cuda.ring import Place, Ring
from services.worker.runner.cuda.state import NO_CHANGES, DeviceState, PageChanges, Updates
from services.worker.runner.cuda.state_kernels import gather_inputs
from services.worker.runner.cuda.step import CudaStep, CutStep
from services.worker.runner.peers import Peers
from services.worker.runner.routed_experts import ExpertRecorder
from services.worker.sampling.fused import FusedSampler
from services.worker.sampling.grammars import SlotGrammars
from services.worker.step.output import StepOutput
from services.worker.step.slots import SlotTable

if TYPE_CHECKING:
    from services.worker.models.skinny_cuda import SkinnyDecoder


class CudaRunner:
    """A runner on a GPU. Owns the slots, the cache and the device's stream. Used by the compute thread alone.

    ``start`` returns as soon as the step is launched. Lengths never depend on sampled tokens, so the host's state
    advances at once. Sampled tokens stay on the device, where the next step reads them.

    Each micro-batch is launched as a decode graph, as piecewise graphs, or eagerly, and ended by a ``StepEnd``.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KvCache,
        attention: CudaAttention,
        sampler: FusedSampler | None,
        state: DeviceState,
        limits: WorkerLimits,
        peers: Peers | None = None,
        grammars: SlotGrammars | None = None,
        recorder: ExpertRecorder | None = None,
    ) -> None:
        """``sampler`` is None on a stage that does not sample, and ``grammars`` on a rank that does not report.

        ``peers``: None = one rank. ``recorder``: None = results carry no experts.
        """
        self.limits = limits
        self._forward, self.cache, self._attention = forward, cache, attention
        self._sampler, self._state = sampler, state
        self._device = cache.all_keys.device
        self._slots = SlotTable(limits, torch.device("cpu"))
        self._peers, self._recorder = peers or Peers(), recorder
        self.grain = self._peers.grain  # the token count of a forward pass is a multiple of it
        self._peers.receive_into(state.last_tokens)
        with torch.inference_mode():  # compilers make separate code for inference tensors
            self._ring = Ring(limits, self._device)
        self._eager = EagerSteps(forward, attention, self._peers)
        self._graphs: DecodeGraphs | None = None
        self._pieces: StepPieces | None = None
        self._end: StepEnd
        if sampler is None:
            self._end = SendingEnd(self._peers, limits.max_slots)
        else:
            self._end = SamplingEnd(sampler, state, self._slots, self._peers, grammars, recorder)
        self._forget_plans()

    @torch.inference_mode()
    def capture(
        self,
        largest: int,
        skinny: "SkinnyDecoder | None" = None,
        pieces: int = 0,
        *,
        has_experts: bool = False,
        has_windows: bool = False,
    ) -> None:
        """Capture decode steps of up to ``largest`` rows, and piecewise graphs for steps of up to ``pieces`` tokens.

        ``skinny``: a faster decoder for few rows. ``has_experts``: the model is a mixture of experts.
        ``has_windows``: layers of the model, also of other stages, have a sliding window.
        """
        if pieces:
            self._pieces = StepPieces(
                self._forward, self._attention, self._peers, pieces, self._state.page_table, has_experts=has_experts
            )
        parts = self._forward, skinny, self.cache, self._attention, self._sampler, self._state, self._slots
        # Padding also chooses experts, whose weights are then read: twice as many for a step of one row.
        most, pads = min(largest, self.limits.max_slots), not has_experts
        # A stage whose layers all have windows ignores groups, and stages have to pad steps alike.
        keeps_size = has_windows and not (self._peers.first and self._peers.last)
        self._graphs = DecodeGraphs(
            *parts, self._ring, most, self._peers, pads=pads, keeps_size=keeps_size, recorder=self._recorder
        )

    @torch.inference_mode()
    def reset(self) -> None:
        """Free every slot and expect step 1 next. All ranks run the same steps before they reset."""
        self._peers.drain()
        self._slots.clear()
        self._end.reset()
        self._ring.forget_last()
        self._forget_plans()

    def _forget_plans(self) -> None:
        # The last plan, and its micro-batches.
        self._last = LastPlan()
        self._parts: list[Standing] = []

    def weights_changed(self) -> None:
        """Do nothing: kernels and graphs read the weights where they are."""

    def close(self) -> None:
        """Wait for the device, and close the connections to other ranks."""
        torch.cuda.synchronize(self._device)
        # Connections cannot be closed before the graphs that use them are deleted.
        self._graphs = self._pieces = None
        gc.collect()
        self._end.guide.close()
        self._peers.close()

    def run(self, plan: Plan) -> StepOutput:
        """Launch a step and wait for its results."""
        return self.start(plan).result()

    @torch.inference_mode()
    def start(self, plan: Plan) -> CudaStep | CutStep:
        """Launch a step.

        Raises ``InvalidRequest`` or ``FailedPrecondition`` for a plan that breaks the contract, on all ranks alike and
        without changing anything, and ``ParallelError`` if this replica cannot continue.
        """
        began = time.perf_counter_ns()
        check_plan(plan, self._last, self._slots, self.limits)
        places: list[Place] = []
        try:
            step = self._run(plan, places)
        except ParallelError:
            raise
        except BaseException as error:
            if not self._peers.alone:  # the device may wait for other ranks, so the host must not wait for it
                raise ParallelError(f"step {plan.step} failed on {self._peers.name}: {error}") from error
            try:
                for place in places:
                    place.abandon()
            except RuntimeError as lost:
                raise DeviceLost(f"the device is lost: {lost}") from error
            raise
        step.timing.prepare = time.perf_counter_ns() - began
        return step

    def _run(self, plan: Plan, places: list[Place]) -> CudaStep | CutStep:
        """Launch a step. Append the places that it uses to ``places``."""
        changes = self._apply(plan)
        if not self._parts:
            return self._run_empty(plan, self._next(places), changes)
        steps = []
        for part in self._parts:
            steps.append(self._run_part(plan, self._next(places), changes, part))
            plan, changes = Plan(plan.step), NO_CHANGES  # the first micro-batch makes all changes
        return steps[0] if len(steps) == 1 else CutStep(plan.step, steps)

    def _next(self, places: list[Place]) -> Place:
        places.append(self._ring.next())
        self._end.guide.catch_up(places[-1])
        return places[-1]

    def _apply(self, plan: Plan) -> PageChanges:
        """Apply the plan's changes on the host. Return those that the device must make."""
        slots, parts = self._slots, []
        self._last = last = self._last.followed_by(plan)
        if plan.releases.size:
            slots.release(plan.releases)
        slots.admit_all(plan.admissions)
        for admission in plan.admissions:
            count = len(admission.pages)
            parts.append(PageChanges(np.full(count, admission.slot), np.arange(count), admission.pages))
        self._end.guide.apply(plan)
        if plan.append_slots.size:
            places = slots.append_pages(plan.append_slots, plan.append_pages)
            parts.append(PageChanges(plan.append_slots, places, plan.append_pages))
        if plan.batch is not None or plan.groups is not None:
            groups = last.groups if self._attention.shares_prefixes else NO_GROUPS
            self._parts = split(last.batch, groups, last.micro_batch_rows, self.limits.page_size)
        return PageChanges.joined(parts)

    def _run_empty(self, plan: Plan, place: Place, changes: PageChanges) -> CudaStep:
        """Run a step without a batch."""
        updates = self._updates(plan, place, changes)
        place.send()
        place.started.record()
        updates.apply(self._state, self.cache)
        return self._end.finish_empty(plan, place)

    def _run_part(self, plan: Plan, place: Place, changes: PageChanges, part: Standing) -> CudaStep:
        slots, rows, counts = self._slots, part.batch.slots, part.batch.token_counts
        if (found := self._find_graph(part)) is not None:
            step = self._replay(plan, place, changes, part, found)
            slots.advance(rows, counts, rows)
            return step
        arrays = build(part.batch, part.groups, slots, self.limits.page_size)
        step = self._launch(plan, place, changes, part, arrays)
        slots.advance(rows, counts, arrays.sample_slots)
        return step

    def _find_graph(self, part: Standing) -> FoundGraph | None:
        """Return the decode graph for ``part``, or None if a row computes several tokens or does not sample."""
        if self._graphs is None or not part.singles:
            return None
        rows = part.batch.slots
        begins = self._slots.computed[rows]
        if (begins + 1 != self._slots.known[rows]).any():
            return None
        pieces = self._pieces is not None and self._pieces.find(len(rows)) is not None
        return self._graphs.find(len(rows), int(begins.max()) + 1, part.spans, pieces)

    def _replay(self, plan: Plan, place: Place, changes: PageChanges, part: Standing, found: FoundGraph) -> CudaStep:
        """Run a micro-batch as a decode graph."""
        graph, tiles = found
        rows, fields = part.batch.slots, graph.fields(place.index)
        begins = self._slots.computed[rows]
        fill_in(fields, place.index * self.limits.max_slots, rows, begins, self._slots)
        if tiles is not None and part.prefix_tokens is not None:
            fill_in_groups(fields, part.prefix_tokens, tiles)
        updates = self._updates(plan, place, NO_CHANGES if append(fields, changes) else changes)
        place.send()
        graph.send(place.index)
        entering = self._enter(place, part, graph.size)
        updates.apply(self._state, self.cache)
        graph.enter(entering)
        return self._end.replay(plan, place, graph, rows, begins + 1)

    def _launch(self, plan: Plan, place: Place, changes: PageChanges, part: Standing, arrays: StepArrays) -> CudaStep:
        """Run a micro-batch eagerly or as piecewise graphs."""
        updates, put = self._updates(plan, place, changes), place.upload.put
        launcher, size = self._choose_launcher(int(part.batch.token_counts.sum()))
        slots, positions, known = (
            put(fill_up(array, size, filler))
            for array, filler in ((arrays.token_slots, -1), (arrays.positions, 0), (arrays.known, -1))
        )
        decodes = arrays.decodes if arrays.chunks is not None else size
        prefix = None if arrays.prefix_tokens is None else put(fill_up(arrays.prefix_tokens, decodes))
        kept = self._end.keep(part, arrays, put)
        batch = CudaBatch(
            slots, positions, self._state.page_table, decodes, arrays.longest, arrays.chunks, arrays.groups, prefix
        )
        attention: Any = launcher.prepare(size, arrays, batch, self._slots.page_table, put)
        place.send()
        entering = self._enter(place, part, size)
        updates.apply(self._state, self.cache)
        token_ids = gather_inputs(
            known, slots, positions, self._state.last_tokens, self._state.page_table, self.cache.tokens
        )
        entering = token_ids if entering is None else entering
        if self._recorder is None:
            leaving = launcher.run(size, entering, positions, attention, kept.tokens)
        else:  # the last layer must choose experts for all tokens, also for those that are not sampled from
            leaving = launcher.run(size, entering, positions, attention, None)
            leaving = leaving if kept.tokens is None else leaving.index_select(0, kept.tokens)
            self._recorder.store_at(slots, positions, self._state.page_table)
        return self._end.finish(
            plan, place, leaving, LaunchedPart(part, arrays, slots, kept), reused=launcher.reuses_output
        )

    def _choose_launcher(self, tokens: int) -> tuple[EagerSteps | StepPieces, int]:
        """Return the launcher of a step of ``tokens`` tokens, and the padded token count."""
        if self._pieces is not None and (size := self._pieces.find(tokens)) is not None:
            return self._pieces, size
        return self._eager, self._eager.size(tokens)

    def _enter(self, place: Place, part: Standing, tokens: int) -> torch.Tensor | None:
        """Return the hidden states of the previous stage for ``tokens`` tokens, padding included.

        None on the first stage. The device starts the step when they have arrived.
        """
        entering = self._peers.receive(tokens, part.batch.slots, self._slots, len(self._parts))
        place.started.record()
        return entering

    def _updates(self, plan: Plan, place: Place, changes: PageChanges) -> Updates:
        return Updates.put(changes, plan, self.limits.max_pages_per_slot, place.upload.put)
