"""The state of a worker, with which a new stream can continue an earlier one."""

from dataclasses import dataclass

from tokasaurus.worker.v1 import plan_pb2


@dataclass
class _Sequence:
    admission: plan_pb2.Admission
    tokens: list[int]
    pages: list[int]
    computed: int


class Mirror:
    """The state after a history of valid plans."""

    def __init__(self, max_context_tokens: int) -> None:
        self._most = max_context_tokens
        self._sequences: dict[int, _Sequence] = {}
        self._batch = plan_pb2.Batch()
        self._dropped: set[int] = set()  # slots of sequences that were full, and were not admitted again

    @property
    def used(self) -> list[int]:
        """Return the occupied slots."""
        return sorted(self._sequences)

    def apply(self, plan: plan_pb2.StepPlan, result: plan_pb2.StepResult) -> None:
        """Apply ``plan`` with its result."""
        for slot in plan.release_slots:
            self._sequences.pop(slot, None)
            self._dropped.discard(slot)
        for each in plan.admissions:
            self._sequences[each.slot] = _Sequence(each, list(each.token_ids), list(each.pages), each.cached_tokens)
        for slot, page in zip(plan.append_slots, plan.append_pages, strict=True):
            self._sequences[slot].pages.append(page)
        if plan.HasField("batch"):
            self._batch = plan.batch
        counts = self._batch.token_counts or [1] * len(self._batch.slots)
        for slot, count in zip(self._batch.slots, counts, strict=True):
            self._sequences[slot].computed += count
        for slot, token in zip(result.slots, result.token_ids, strict=True):
            self._sequences[slot].tokens.append(token)

    def again(self) -> plan_pb2.StepPlan:
        """Return the first plan of a new stream, which admits all sequences. Computed tokens count as cached."""
        plan = plan_pb2.StepPlan(step=1)
        for slot, each in list(self._sequences.items()):
            if len(each.tokens) > self._most:
                del self._sequences[slot]
                self._dropped.add(slot)
                continue
            told = plan.admissions.add()
            told.CopyFrom(each.admission)
            told.prompt_tokens = each.admission.prompt_tokens or len(each.admission.token_ids)
            del told.token_ids[:], told.pages[:]
            told.token_ids.extend(each.tokens)
            told.pages.extend(each.pages)
            told.cached_tokens = each.computed
        return plan

    def next(self, plan: plan_pb2.StepPlan, step: int) -> plan_pb2.StepPlan:
        """Return ``plan`` of the history as step ``step`` of a new stream."""
        told = plan_pb2.StepPlan()
        told.CopyFrom(plan)
        told.step = step
        del told.release_slots[:]
        told.release_slots.extend(slot for slot in plan.release_slots if slot not in self._dropped)
        if not told.HasField("batch"):
            told.batch.CopyFrom(self._batch)
        return told
