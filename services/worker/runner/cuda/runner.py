"""Runs plans on a GPU: the host prepares a step while the device computes the ones before, and waits for none."""

import contextlib
import time
from collections.abc import Callable

import numpy as np
import torch

from services.worker.attention.cuda import CudaAttention, CudaBatch
from services.worker.kv_cache import KvCache
from services.worker.runner.base import DeviceLost
from services.worker.runner.checks import check_plan
from services.worker.runner.cuda.block import append, fill_in, fill_in_groups
from services.worker.runner.cuda.graphs import DecodeGraph, DecodeGraphs, Forward
from services.worker.runner.cuda.inputs import Standing, StepArrays, build, fill_up, padded
from services.worker.runner.cuda.ring import Place, Ring
from services.worker.runner.cuda.state import NO_CHANGES, DeviceState, PageChanges, Updates
from services.worker.runner.cuda.state_kernels import advance, gather_inputs
from services.worker.runner.cuda.step import CudaStep, Era
from services.worker.runner.plan import NO_GROUPS, NO_ROWS, Limits, Plan, StepOutput
from services.worker.runner.slots import SlotTable
from services.worker.sampling.fused import FusedSampler
from services.worker.sampling.rows import SampleRows

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
        sampler: FusedSampler,
        state: DeviceState,
        limits: Limits,
    ) -> None:
        self.limits = limits
        self._forward, self._cache, self._attention, self._sampler = forward, cache, attention, sampler
        self._device = cache.all_keys.device
        self._slots = SlotTable(limits, torch.device("cpu"))
        self._state = state
        self._ring = Ring(limits, self._device)
        # Two, or what a step sends back would hold up what the next one needs.
        self._uploads, self._downloads = torch.cuda.Stream(), torch.cuda.Stream()
        self._graphs: DecodeGraphs | None = None
        self._step = 0
        self._standing = Standing.of(NO_ROWS, NO_GROUPS, limits.page_size)
        self._era = Era(limits.max_slots)

    @torch.inference_mode()
    def capture(self, largest: int, skinny: Forward | None = None) -> None:
        """Make CUDA graphs of decode steps with up to ``largest`` rows; ``skinny``: what is faster for few."""
        parts = self._forward, skinny, self._cache, self._attention, self._sampler, self._state, self._slots
        self._graphs = DecodeGraphs(*parts, self._ring, min(largest, self.limits.max_slots))

    def reset(self) -> None:
        """Free every slot and expect step 1 next. Pages keep their content, which nobody refers to any more."""
        self._slots.clear()
        self._step, self._standing = 0, Standing.of(NO_ROWS, NO_GROUPS, self.limits.page_size)
        self._era = Era(self.limits.max_slots)
        self._ring.forget_last()

    def close(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def run(self, plan: Plan) -> StepOutput:
        """``start``, and wait for it."""
        return self.start(plan).result()

    @torch.inference_mode()
    def start(self, plan: Plan) -> CudaStep:
        """Launch a step. Raises ``InvalidRequest`` or ``FailedPrecondition``, having changed nothing, for a plan that
        breaks the contract."""
        began = time.perf_counter_ns()
        check_plan(plan, self._step, self._standing.batch, self._standing.groups, self._slots, self.limits)
        place = self._ring.next()
        try:
            step = self._run(plan, place)
        except BaseException as error:
            try:
                place.abandon()
            except Exception as lost:
                raise DeviceLost(f"the device is lost: {lost}") from error
            raise
        step.timing.prepare = time.perf_counter_ns() - began
        return step

    def _run(self, plan: Plan, place: Place) -> CudaStep:
        changes, slots, standing = self._apply(plan), self._slots, self._standing
        rows, counts = standing.batch.slots, standing.batch.token_counts
        if not len(rows):
            return self._run_nothing(plan, place, changes)
        if standing.singles:
            begins = slots.computed[rows]
            if (graph := self._find_graph(rows, begins)) is not None:
                step = self._replay(plan, place, changes, graph, begins)
                slots.advance(rows, counts, rows)
                return step
        arrays = build(standing.batch, standing.groups, slots, self.limits.page_size)
        step = self._launch(plan, place, changes, arrays)
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
        if plan.admissions:
            slots.derive(np.array([admission.slot for admission in plan.admissions]))
        if plan.append_slots.size:
            places = slots.append_pages(plan.append_slots, plan.append_pages)
            parts.append(PageChanges(plan.append_slots, places, plan.append_pages))
        if plan.batch is not None or plan.groups is not None:
            batch = self._standing.batch if plan.batch is None else plan.batch
            groups = self._standing.groups if plan.groups is None else plan.groups
            self._standing = Standing.of(batch, groups, self.limits.page_size)
        return PageChanges.joined(parts)

    def _run_nothing(self, plan: Plan, place: Place, changes: PageChanges) -> CudaStep:
        """A step without a batch."""
        updates = self._updates(plan, place, changes)
        self._upload(place)
        place.started.record()
        updates.apply(self._state, self._cache)
        place.begin_sampling()
        return self._finish(plan, place, None, None, None)

    def _find_graph(self, rows: np.ndarray, begins: np.ndarray) -> DecodeGraph | None:
        """What runs a step of ``rows`` that compute one token each, at ``begins``; None where one of them does not
        sample, and where nothing was captured for so many."""
        if self._graphs is None or (begins + 1 != self._slots.known[rows]).any():
            return None
        return self._graphs.find(len(rows), int(begins.max()) + 1, self._standing.spans)

    def _replay(
        self, plan: Plan, place: Place, changes: PageChanges, graph: DecodeGraph, begins: np.ndarray
    ) -> CudaStep:
        """A step through a graph."""
        rows, fields = self._standing.batch.slots, graph.fields(place.index)
        fill_in(fields, place.index * self.limits.max_slots, rows, begins, self._slots)
        if graph.grouped:
            fill_in_groups(fields, self._standing.prefix_tokens, self._graphs.tiles(self._standing.spans))
        updates = self._updates(plan, place, NO_CHANGES if append(fields, changes) else changes)
        plain, sample_rows = self._slots.plain[rows].all(), None
        if not plain:
            sample_rows = self._sampler.prepare(self._slots, rows, begins + 1, place.upload.put, len(fields.slots))
        self._upload(place)
        graph.send(place.index)
        place.started.record()
        updates.apply(self._state, self._cache)
        if plain:
            graph.run_whole()
            place.end(long=len(rows) > _SHORT_ROWS)
            return CudaStep(plan, place, self._era, rows)
        hidden = graph.run()
        place.begin_sampling()
        return self._finish(plan, place, hidden, sample_rows, graph.inputs.slots)

    def _launch(self, plan: Plan, place: Place, changes: PageChanges, arrays: StepArrays) -> CudaStep:
        """A step kernel by kernel."""
        updates = self._updates(plan, place, changes)
        put, tokens = place.upload.put, padded(len(arrays.token_slots))
        slots, positions, known = (
            put(fill_up(array, tokens, filler))
            for array, filler in ((arrays.token_slots, -1), (arrays.positions, 0), (arrays.known, -1))
        )
        decodes = arrays.decodes if arrays.chunks is not None else tokens
        prefix = None if arrays.prefix_tokens is None else put(fill_up(arrays.prefix_tokens, decodes))
        rows, sample_slots, keep = self._prepare_sampling(arrays, slots, put)
        batch = CudaBatch(
            slots, positions, self._state.page_table, decodes, arrays.longest, arrays.chunks, arrays.groups, prefix
        )
        attention = self._attention.prepare(batch, self._slots.page_table, put)
        self._upload(place)
        place.started.record()
        updates.apply(self._state, self._cache)
        token_ids = gather_inputs(
            known, slots, positions, self._state.last_tokens, self._state.page_table, self._cache.tokens
        )
        hidden = self._forward(token_ids, positions, attention, keep)
        place.begin_sampling()
        return self._finish(plan, place, hidden, rows, sample_slots, arrays.batch_order)

    def _updates(self, plan: Plan, place: Place, changes: PageChanges) -> Updates:
        return Updates.put(changes, plan, self.limits.max_pages_per_slot, place.upload.put)

    def _prepare_sampling(
        self, arrays: StepArrays, token_slots: torch.Tensor, put: Callable[[np.ndarray], torch.Tensor]
    ) -> tuple[SampleRows | None, torch.Tensor | None, torch.Tensor | None]:
        """Settings of the rows that sample, their slots on the device, and which tokens they are (None = all)."""
        if len(arrays.sample_slots) == 0:
            return None, None, put(np.zeros(padded(1), np.int32))
        rows = self._sampler.prepare(self._slots, arrays.sample_slots, arrays.sample_positions, put)
        if arrays.keep is None:
            return rows, token_slots, None
        return rows, put(arrays.sample_slots.astype(np.int32)), put(fill_up(arrays.keep, padded(len(arrays.keep))))

    def _finish(
        self,
        plan: Plan,
        place: Place,
        hidden: torch.Tensor | None,
        rows: SampleRows | None,
        sample_slots: torch.Tensor | None,
        order: np.ndarray | None = None,
    ) -> CudaStep:
        """Sample; keep the tokens for the next step, and send them to the host behind the device's back."""
        if rows is None:
            place.end()
            return CudaStep(plan, place, self._era, _NOBODY)
        count, sampled = len(rows.slots), self._sampler.run(hidden, rows)
        advance(sampled.token_ids, sampled.finite, sample_slots[:count], self._state.last_tokens, place.results[:count])
        place.end()
        short = count <= _SHORT_ROWS
        with contextlib.nullcontext() if short else torch.cuda.stream(self._downloads):
            if not short:
                self._downloads.wait_event(place.ended)
            place.host_results[:count].copy_(place.results[:count], non_blocking=True)
            extras = tuple(_to_host(tensor) for tensor in sampled[2:])
            place.finished(long=not short)
        return CudaStep(plan, place, self._era, rows.slots, rows, extras, order)

    def _upload(self, place: Place) -> None:
        """Send what was put; what is launched from here on finds it."""
        if place.upload.used <= _SHORT_UPLOAD:
            place.upload.send()
            return
        with torch.cuda.stream(self._uploads):
            place.upload.send()
            place.uploaded.record()
        torch.cuda.current_stream().wait_event(place.uploaded)


def _to_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in pinned memory, complete when the current stream has come so far."""
    if tensor is None:
        return None
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)
