"""Runs plans on a GPU: the host prepares a step while the device computes the ones before, and waits for none."""

import time
from collections.abc import Callable

import numpy as np
import torch

from services.worker.attention.cuda import CudaAttention, CudaBatch
from services.worker.kv_cache import KvCache
from services.worker.runner.checks import check_plan
from services.worker.runner.cuda.graphs import DecodeGraphs, Forward, Kind
from services.worker.runner.cuda.inputs import NO_ARRAYS, StepArrays, build, fill_up, padded
from services.worker.runner.cuda.ring import Place, Ring
from services.worker.runner.cuda.state import DeviceState, Updates
from services.worker.runner.cuda.state_kernels import advance, gather_inputs
from services.worker.runner.cuda.step import CudaStep, Era
from services.worker.runner.plan import NO_GROUPS, NO_ROWS, Batch, Groups, Limits, Plan, StepOutput
from services.worker.runner.slots import SlotTable
from services.worker.sampling.fused import FusedSampler
from services.worker.sampling.outcome import SampledOnDevice
from services.worker.sampling.rows import SampleRows

# So few rows or bytes are sent on the stream of the kernels: the device loses less than the host would.
_SHORT_ROWS = 64
_SHORT_UPLOAD = 16 * 1024
# Pages copied at once: what is read is held until it is written.
_COPIES_AT_ONCE = 64


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
        self._batch: Batch = NO_ROWS
        self._groups: Groups = NO_GROUPS
        self._era = Era(limits.max_slots)

    @torch.inference_mode()
    def capture(self, largest: int, skinny: Forward | None = None) -> None:
        """Make CUDA graphs of decode steps with up to ``largest`` rows; ``skinny``: what is faster for few."""
        parts = self._forward, skinny, self._cache, self._attention, self._sampler, self._state, self._slots
        self._graphs = DecodeGraphs(*parts, min(largest, self.limits.max_slots))

    def reset(self) -> None:
        """Free every slot and expect step 1 next. Pages keep their content, which nobody refers to any more."""
        self._slots.clear()
        self._step, self._batch, self._groups = 0, NO_ROWS, NO_GROUPS
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
        check_plan(plan, self._step, self._batch, self._groups, self._slots, self.limits)
        place = self._ring.next()
        try:
            step = self._run(plan, place)
        except BaseException:
            place.finished(long=False)  # what was launched may still read its buffers
            place.taken.set()  # nobody will take results
            raise
        step.timing.prepare = time.perf_counter_ns() - began
        return step

    def _run(self, plan: Plan, place: Place) -> CudaStep:
        updates = self._apply(plan, place.upload.put)
        if len(self._batch.slots) == 0:
            self._send(place)
            updates.apply(self._state, self._cache)
            place.begin_sampling()
            return self._collect(plan, place, NO_ARRAYS, None, None, None)
        arrays = build(self._batch, self._groups, self._slots, self.limits.page_size)
        step = self._launch(plan, place, updates, arrays)
        self._slots.advance(self._batch.slots, self._batch.token_counts, arrays.sample_slots)
        return step

    def _apply(self, plan: Plan, put: Callable[[np.ndarray], torch.Tensor]) -> Updates:
        """Make the plan's changes on the host; returns those that the device must make."""
        slots, width = self._slots, self.limits.max_pages_per_slot
        self._step = plan.step
        if plan.releases.size:
            slots.release(plan.releases)
        indices, pages = [], []
        for admission in plan.admissions:
            slots.admit(admission)
            indices.append(admission.slot * width + np.arange(len(admission.pages)))
            pages.append(admission.pages)
        if plan.append_slots.size:
            indices.append(slots.append_pages(plan.append_slots, plan.append_pages) + plan.append_slots * width)
            pages.append(plan.append_pages)
        if plan.batch is not None:
            self._batch = plan.batch
        if plan.groups is not None:
            self._groups = plan.groups
        copies = self._copies_in_turn(plan.copy_sources, plan.copy_targets, put)
        if not indices:
            return Updates(None, None, copies)
        return Updates(
            put(np.concatenate(indices).astype(np.int64)), put(np.concatenate(pages).astype(np.int32)), copies
        )

    @staticmethod
    def _copies_in_turn(
        sources: np.ndarray, targets: np.ndarray, put: Callable[[np.ndarray], torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        parts = (slice(start, start + _COPIES_AT_ONCE) for start in range(0, len(sources), _COPIES_AT_ONCE))
        return [(put(sources[part]), put(targets[part])) for part in parts]

    def _launch(self, plan: Plan, place: Place, updates: Updates, arrays: StepArrays) -> CudaStep:
        kind = None if self._graphs is None else self._graphs.kind_of(arrays)
        if kind is not None:
            return self._replay(plan, place, updates, arrays, kind)
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
        self._send(place)
        updates.apply(self._state, self._cache)
        token_ids = gather_inputs(
            known, slots, positions, self._state.last_tokens, self._state.page_table, self._cache.tokens
        )
        hidden = self._forward(token_ids, positions, attention, keep)
        place.begin_sampling()
        return self._finish(plan, place, arrays, hidden, rows, sample_slots)

    def _replay(self, plan: Plan, place: Place, updates: Updates, arrays: StepArrays, kind: Kind) -> CudaStep:
        """A step through a graph."""
        graph, put = self._graphs.graph(kind), place.upload.put
        inputs = self._graphs.put(kind, arrays, put)
        rows = self._sampler.prepare(self._slots, arrays.sample_slots, arrays.sample_positions, put, kind.size)
        self._send(place)
        updates.apply(self._state, self._cache)
        if rows.plain:
            return self._collect(plan, place, arrays, graph.run_whole(inputs, rows), rows, inputs.slots)
        hidden = graph.run(inputs)
        place.begin_sampling()
        return self._finish(plan, place, arrays, hidden, rows, inputs.slots)

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
        arrays: StepArrays,
        hidden: torch.Tensor,
        rows: SampleRows | None,
        sample_slots: torch.Tensor | None,
    ) -> CudaStep:
        sampled = None if rows is None else self._sampler.run(hidden, rows)
        return self._collect(plan, place, arrays, sampled, rows, sample_slots)

    def _collect(
        self,
        plan: Plan,
        place: Place,
        arrays: StepArrays,
        sampled: SampledOnDevice | None,
        rows: SampleRows | None,
        sample_slots: torch.Tensor | None,
    ) -> CudaStep:
        """Keep the tokens for the next step, and send them to the host behind the device's back."""
        count = len(arrays.sample_slots)
        if sampled is not None:
            advance(
                sampled.token_ids, sampled.finite, sample_slots[:count], self._state.last_tokens, place.results[:count]
            )
        place.ended.record()
        short = count <= _SHORT_ROWS
        if short:
            fetched = self._fetch(place, sampled, count)
            place.finished(long=False)
        else:
            with torch.cuda.stream(self._downloads):
                self._downloads.wait_event(place.ended)
                fetched = self._fetch(place, sampled, count)
                place.finished(long=True)
        return CudaStep(plan, place, arrays, rows, fetched, self._era)

    def _fetch(self, place: Place, sampled: SampledOnDevice | None, count: int) -> tuple[torch.Tensor | None, ...]:
        """Send results to the host on the current stream."""
        if not count:
            return ()
        place.host_results[:count].copy_(place.results[:count], non_blocking=True)
        return tuple(_to_host(tensor) for tensor in sampled[2:])

    def _send(self, place: Place) -> None:
        if place.upload.used <= _SHORT_UPLOAD:
            place.started.record()
            place.upload.send()
            return
        with torch.cuda.stream(self._uploads):
            place.upload.send()
            place.uploaded.record()
        torch.cuda.current_stream().wait_event(place.uploaded)
        place.started.record()


def _to_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in pinned memory, complete when the current stream has come so far."""
    if tensor is None:
        return None
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return pinned.copy_(tensor, non_blocking=True)
