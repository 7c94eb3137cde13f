"""The spans of prompts that are computed for requests that are traced: from their plan's arrival to the answer of the
step behind which their first token comes."""

import time
from typing import TYPE_CHECKING

import numpy as np

from services.common.packed import read_fixed32
from services.common.plan.result import Timing
from services.common.process.tracing import Tracing
from tokasaurus.worker.v1 import plan_pb2

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_MOST_OPEN = 64  # a span takes some ten microseconds, and steps wait: prompts beyond these have none


class Prefill:
    """One sequence's, in its slot."""

    __slots__ = ("missing", "span", "steps")

    def __init__(self, span: "Span", missing: int) -> None:
        self.span = span
        self.missing = missing  # tokens to compute
        self.steps = 0

    def end(self, timing: Timing) -> None:
        """The last of its steps, which took so long, is answered."""
        self.span.set_attribute("toka.steps", self.steps)
        for name, ns in (("forward", timing.forward), ("sample", timing.sample), ("device", timing.device)):
            self.span.set_attribute(f"toka.last_step.{name}_ms", ns * 1e-6)
        self.span.end()


class PrefillTraces:
    """Owned by the compute thread, but for ``Prefill.end``, which the one that answers calls."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._open: dict[int, Prefill] = {}  # by slot
        self._batch = plan_pb2.Batch()  # the latest

    def see(self, plan: plan_pb2.StepPlan, waited_ns: int) -> list[Prefill]:
        """A plan that keeps the contract is started, ``waited_ns`` after it came: those that are through with it."""
        if plan.HasField("batch"):
            self._batch = plan.batch
        for slot in plan.release_slots if self._open else ():
            if (prefill := self._open.pop(slot, None)) is not None:
                self._give_up(prefill)
        for admission in plan.admissions:
            if admission.traceparent and len(self._open) < _MOST_OPEN:
                self._begin(admission, plan.step, waited_ns)
        return self._advance() if self._open else []

    def reset(self) -> None:
        """Every slot is free."""
        for prefill in self._open.values():
            self._give_up(prefill)
        self._open.clear()

    def _begin(self, admission: plan_pb2.Admission, step: int, waited_ns: int) -> None:
        missing = len(admission.token_ids) - admission.cached_tokens
        attributes = {
            "toka.slot": admission.slot,
            "toka.sample": admission.sampling.sample_index,
            "toka.first_step": step,
            "toka.tokens": missing,
            "toka.cached_tokens": admission.cached_tokens,
        }
        start_ns = time.time_ns() - waited_ns
        span = self._tracing.start("prefill", admission.traceparent, "server", attributes, start_ns=start_ns)
        self._open[admission.slot] = Prefill(span, missing)

    def _advance(self) -> list[Prefill]:
        slots, counts = read_fixed32(self._batch.slots), read_fixed32(self._batch.token_counts)
        through = []
        for slot, prefill in list(self._open.items()):
            rows = np.flatnonzero(slots == slot)
            if not len(rows):
                continue
            prefill.steps += 1
            prefill.missing -= int(counts[rows[0]]) if len(counts) else 1
            if prefill.missing <= 0:
                through.append(self._open.pop(slot))
        return through

    def _give_up(self, prefill: Prefill) -> None:
        self._tracing.fail(prefill.span, "RELEASED")
        prefill.span.end()
