"""The sequences in the slots of a worker."""

from collections.abc import Iterator
from typing import NamedTuple

from tokasaurus.worker.v1 import plan_pb2, record_pb2


class SequenceName(NamedTuple):
    """Name of a sample, in the form of ``toka-inspect sequence=``."""

    request_id: str
    sample: int

    def __str__(self) -> str:
        return f"{self.request_id}:{self.sample}"


def admitted(record: record_pb2.PlanRecord) -> Iterator[tuple[SequenceName, plan_pb2.Admission]]:
    """Yield the admissions of a plan with the names of their sequences."""
    for admission, request_id in zip(record.plan.admissions, record.admitted_ids, strict=True):
        yield SequenceName(request_id, admission.sampling.sample_index), admission


class Occupants(dict[int, SequenceName]):
    """Sequences by slot, updated with each plan."""

    def apply(self, record: record_pb2.PlanRecord) -> None:
        """Apply the releases and then the admissions of a plan."""
        for slot in record.plan.release_slots:
            self.pop(slot, None)
        self.update((admission.slot, name) for name, admission in admitted(record))

    def name(self, slot: int) -> str:
        """Return the name of the sequence in ``slot``, or a dash if it is free."""
        return str(self.get(slot, "-"))
