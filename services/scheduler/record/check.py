"""Holds a recording against the worker's contract, plan by plan."""

from dataclasses import dataclass, field
from pathlib import Path

from services.scheduler.record.occupants import SequenceName
from services.scheduler.record.reader import Recording, RecordingError
from services.scheduler.record.violation import Violation
from services.scheduler.record.worker_state import WorkerState


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
    damage: str = ""  # why the file cannot be read, or no further; empty = it can
    ending: str = ""  # empty = not read so far

    @property
    def good(self) -> bool:
        """Nothing is wrong as far as the file goes; it may hold no plan."""
        return not self.violation and not self.damage


def check_file(path: Path) -> Findings:
    """``check``, and a file that does not even begin as a recording is a finding too."""
    try:
        return check(Recording(path))
    except RecordingError as error:
        return Findings(damage=str(error))


def check(recording: Recording) -> Findings:
    """Streams: memory grows with the sequences only."""
    state, found = WorkerState(recording), Findings()
    try:
        for step in recording.steps():
            found.tokens += state.apply(step)
            found.plans += 1
            found.unanswered += step.result is None
            found.failures += len(step.result.result.failures) if step.result else 0
            found.admissions += len(step.plan.plan.admissions)
            names = (state.occupants.get(admission.slot) for admission in step.plan.plan.admissions)
            found.sequences.update(name for name in names if name is not None)
        found.ending = recording.ending
    except Violation as violation:
        who = "" if violation.slot is None else f" ({state.occupants.name(violation.slot)})"
        found.violation = f"{violation}{who}"
    except RecordingError as error:
        found.damage = str(error)
    found.prefilled_tokens, found.peak_pages = state.checker.prefilled_tokens, state.checker.peak_pages
    return found
