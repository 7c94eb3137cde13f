"""Which sequence is in which slot, as the plans say."""

from typing import NamedTuple

from tokasaurus.worker.v1 import record_pb2


class SequenceName(NamedTuple):
    """One sample of a request, as `toka-inspect sequence=` takes it."""

    request_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.request_id}:{self.sample}"


class Occupants:
    """Filled by one plan after another."""

    def __init__(self) -> None:
        self._names: dict[int, SequenceName] = {}

    def apply(self, record: record_pb2.PlanRecord) -> None:
        """Releases, then admissions."""
        for slot in record.plan.release_slots:
            self._names.pop(slot, None)
        for admission, request_id in zip(record.plan.admissions, record.admitted_ids, strict=True):
            self._names[admission.slot] = SequenceName(request_id, admission.sampling.sample_index)

    def name(self, slot: int) -> str:
        """The sequence in ``slot``; a dash when it is free."""
        return str(self._names.get(slot, "-"))

    def get(self, slot: int) -> SequenceName | None:
        return self._names.get(slot)
