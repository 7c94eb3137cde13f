"""Spans of the prefills of traced requests.

A span begins when the plan of the admission arrives, and ends with the result of the step that samples the first token.
"""

import time
from typing import TYPE_CHECKING

import numpy as np

from services.common.packed import read_fixed32
from services.common.plan.result import Timing
from services.common.process.tracing import Tracing
from tokasaurus.worker.v1 import plan_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_MOST_OPEN = 64  # open spans; further prompts have none, since a span delays its step by about ten microseconds


class PrefillTrace:
    """The span of one sequence's prompt."""

    __slots__ = ("missing", "span", "steps")

    def __init__(self, span: "Span", missing: int) -> None:
        self.span = span
        self.missing = missing  # tokens to compute
        self.steps = 0

    def end(self, timing: Timing) -> None:
        """End the span. ``timing`` is that of the last step."""
        self.span.set_attribute("toka.steps", self.steps)
        for name, ns in (("forward", timing.forward), ("sample", timing.sample), ("device", timing.device)):
            self.span.set_attribute(f"toka.last_step.{name}_ms", ns * 1e-6)
        self.span.end()


class PrefillTraces:
    """The open spans by slot. Owned by the compute thread; the answering thread calls only ``PrefillTrace.end``."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[int, PrefillTrace] = {}  # by slot
        self._batch = plan_pb2.Batch()  # the latest

    def start_plan(self, plan: plan_pb2.StepPlan, age_ns: int) -> list[PrefillTrace]:
        """Record that the step of a valid ``plan`` was started. The plan arrived ``age_ns`` nanoseconds ago.

        Return the prefills that this step completes.
        """
        if plan.HasField("batch"):
            self._batch = plan.batch
        for slot in plan.release_slots if self._open else ():
            if (prefill := self._open.pop(slot, None)) is not None:
                self._abandon(prefill)
        for admission in plan.admissions:
            if admission.traceparent and len(self._open) < _MOST_OPEN:
                self._begin(admission, plan.step, age_ns)
        return self._advance() if self._open else []

    def reset(self) -> None:
        """End all open spans, because every slot is free."""
        for prefill in self._open.values():
            self._abandon(prefill)
        self._open.clear()

    def _begin(self, admission: plan_pb2.Admission, step: int, age_ns: int) -> None:
        missing = len(admission.token_ids) - admission.cached_tokens
        attributes = {
            "toka.slot": admission.slot,
            "toka.sample": admission.sampling.sample_index,
            "toka.first_step": step,
            "toka.tokens": missing,
            "toka.cached_tokens": admission.cached_tokens,
        }
        start_ns = time.time_ns() - age_ns
        span = self._tracing.start("prefill", admission.traceparent, "server", attributes, start_ns=start_ns)
        self._open[admission.slot] = PrefillTrace(span, missing)

    def _advance(self) -> list[PrefillTrace]:
        slots, counts = read_fixed32(self._batch.slots), read_fixed32(self._batch.token_counts)
        completed = []
        for slot, prefill in list(self._open.items()):
            rows = np.flatnonzero(slots == slot)
            if not len(rows):
                continue
            prefill.steps += 1
            prefill.missing -= int(counts[rows[0]]) if len(counts) else 1
            if prefill.missing <= 0:
                completed.append(self._open.pop(slot))
        return completed

    def _abandon(self, prefill: PrefillTrace) -> None:
        self._tracing.fail(prefill.span, "RELEASED")
        prefill.span.end()
