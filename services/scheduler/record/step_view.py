"""View of a step: the parts of its plan, its batch, and its result."""

from datetime import UTC, datetime

from rich.console import RenderableType

from services.scheduler.record.occupants import admitted
from services.scheduler.record.reader import RecordedStep
from services.scheduler.record.view import View, listed, table
from services.scheduler.record.worker_state import WorkerState
from tokasaurus.worker.v1 import record_pb2


class StepView(View):
    """View of one step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._parts: list[RenderableType] = []

    def before(self, step: RecordedStep, state: WorkerState) -> None:
        record, plan = step.plan, step.plan.plan
        if plan.step != self._step:
            return
        self._parts += [_heading(step)]
        ids = zip(plan.release_slots, step.plan.released_ids, strict=True)
        released = [(slot, state.occupants.get(slot) or request_id) for slot, request_id in ids]
        if released:
            self._parts.append(table("released", ("slot", "sequence"), released))
        if plan.admissions:
            self._parts.append(_admissions(record))
        if plan.copy_source_pages:
            copies = zip(plan.copy_source_pages, plan.copy_target_pages, strict=False)
            self._parts.append(table("pages copied", ("from", "onto"), copies))

    def after(self, step: RecordedStep, state: WorkerState) -> None:
        plan = step.plan.plan
        if plan.step != self._step:
            return
        self.done = True
        name, checker = state.occupants.name, state.checker
        if plan.append_slots:
            rows = zip(plan.append_slots, map(name, plan.append_slots), plan.append_pages, strict=True)
            self._parts.append(table("pages appended", ("slot", "sequence", "page"), rows))
        last = checker.last
        if len(last.groups):
            origin = "this plan's" if plan.HasField("hydragen") else "as before"
            groups = zip(last.groups.starts, last.groups.counts, last.groups.prefix_pages, strict=True)
            of_groups = ((f"{start}-{start + count - 1}", count, shared) for start, count, shared in groups)
            self._parts.append(table(f"Hydragen groups ({origin})", ("rows", "count", "pages shared"), of_groups))
        self._parts.append(_batch(step, state))

    def shown(self) -> list[RenderableType]:
        return self._parts


def _heading(step: RecordedStep) -> str:
    plan = step.plan.plan
    sent = datetime.fromtimestamp(step.plan.sent_ns / 1e9, UTC).isoformat(timespec="microseconds")
    if step.result is None:
        answer = "no answer"
    else:
        took = (step.result.received_ns - step.plan.sent_ns) / 1e6
        timing = step.result.result.timing
        answer = (
            f"answered after {took:.3f} ms (queued {timing.queued_ns / 1e6:.3f}, forward"
            f" {timing.forward_ns / 1e6:.3f}, sampling {timing.sample_ns / 1e6:.3f} ms)"
        )
    weights = "" if step.weights is None else f", with the new weights {step.weights.version!r}"
    return f"step {plan.step}, sent {sent}{weights}, {answer}"


def _admissions(record: record_pb2.PlanRecord) -> RenderableType:
    rows = (
        (each.slot, name, len(each.token_ids), each.cached_tokens, listed(each.pages))
        for name, each in admitted(record)
    )
    return table("admitted", ("slot", "sequence", "tokens", "cached", "pages"), rows)


def _batch(step: RecordedStep, state: WorkerState) -> RenderableType:
    plan, checker = step.plan.plan, state.checker
    last = checker.last
    slots, counts = last.batch.slots.tolist(), last.batch.token_counts.tolist()
    result = step.result.result if step.result else None
    outcome: dict[int, object] = {}
    if result is not None:
        outcome = dict(zip(result.slots, result.token_ids, strict=True))
        outcome |= {failure.slot: f"failed: {failure.message}" for failure in result.failures}
    parts = [part for part, rows in enumerate(last.micro_batch_rows) for _ in range(rows)]
    rows = (
        (row, parts[row] if parts else 0, slot, state.occupants.name(slot), count, checker.slots.computed[slot],
         outcome.get(slot, "-"))
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True))
    )  # fmt: skip
    origin = "this plan's" if plan.HasField("batch") else "as before"
    title = f"batch ({origin}): {len(slots)} rows, {sum(counts)} tokens, {max(1, len(last.micro_batch_rows))} parts"
    return table(title, ("row", "part", "slot", "sequence", "computes", "computed then", "token sampled"), rows)
