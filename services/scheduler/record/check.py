"""Holds a recording against the worker's contract, plan by plan."""

from dataclasses import dataclass, field

from services.scheduler.record.checker import PlanChecker
from services.scheduler.record.occupants import Occupants, SequenceName
from services.scheduler.record.reader import Recording
from services.scheduler.record.violation import Violation


@dataclass
class Findings:
    """What is in a recording, as far as it keeps the contract."""

    plans: int = 0
    unanswered: int = 0  # plans at the end
    tokens: int = 0  # sampled
    prefilled_tokens: int = 0
    sequences: set[SequenceName] = field(default_factory=set)
    admissions: int = 0  # more than sequences: some were interrupted and came back
    failures: int = 0
    peak_pages: int = 0
    violation: str = ""  # empty = none; what follows it was not looked at
    ending: str = ""  # empty = not read so far


def check(recording: Recording) -> Findings:
    """Streams: memory grows with the sequences only. Raises ``RecordingError``."""
    checker, occupants, found = PlanChecker(recording.info), Occupants(), Findings()
    for step in recording.steps():
        occupants.apply(step.plan)
        try:
            checker.apply(step.plan.plan)
            found.tokens += checker.answered(step.result.result if step.result else None)
        except Violation as violation:
            who = "" if violation.slot is None else f" ({occupants.name(violation.slot)})"
            found.violation = f"{violation}{who}"
            break
        found.plans += 1
        found.unanswered += step.result is None
        found.failures += len(step.result.result.failures) if step.result else 0
        found.admissions += len(step.plan.plan.admissions)
        found.sequences.update(occupants.get(admission.slot) for admission in step.plan.plan.admissions)
    else:
        found.ending = recording.ending
    found.prefilled_tokens, found.peak_pages = checker.prefilled_tokens, checker.peak_pages
    return found
