"""Checks a recording against the worker's contract, plan by plan."""

from dataclasses import dataclass, field
from pathlib import Path

from services.scheduler.record.occupants import SequenceName
from services.scheduler.record.reader import Recording, RecordingError
from services.scheduler.record.violation import Violation
from services.scheduler.record.worker_state import WorkerState


@dataclass
class Findings:
    """Contents of a recording up to the first violation of the contract."""

    plans: int = 0
    unanswered: int = 0  # plans at the end without a result
    tokens: int = 0  # sampled
    prefilled_tokens: int = 0
    sequences: set[SequenceName] = field(default_factory=set)
    admissions: int = 0  # includes those of preempted sequences
    failures: int = 0
    peak_pages: int = 0
    violation: str = ""  # empty = none; the rest of the recording is not checked
    damage: str = ""  # the reason why the file cannot be read completely; empty = it can
    ending: str = ""  # of the recording; empty = not reached

    @property
    def good(self) -> bool:
        """True without a violation and damage. The file may have no plan."""
        return not self.violation and not self.damage


def check_file(path: Path) -> Findings:
    """Check the recording ``path``. A file that is not a recording is a finding."""
    try:
        return check(Recording(path))
    except RecordingError as error:
        return Findings(damage=str(error))


def check(recording: Recording) -> Findings:
    """Check ``recording`` step by step. Memory grows only with the number of sequences."""
    state, found = WorkerState(recording), Findings()
    try:
        for step in recording.steps():
            found.tokens += state.apply(step)
            found.plans += 1
            found.unanswered += step.result is None
            found.failures += len(step.result.result.failures) if step.result else 0
            found.admissions += len(step.plan.plan.admissions)
            found.sequences.update(state.occupants[admission.slot] for admission in step.plan.plan.admissions)
        found.ending = recording.ending
    except Violation as violation:
        sequence = "" if violation.slot is None else f" ({state.occupants.name(violation.slot)})"
        found.violation = f"{violation}{sequence}"
    except RecordingError as error:
        found.damage = str(error)
    found.prefilled_tokens, found.peak_pages = state.checker.prefilled_tokens, state.checker.peak_pages
    return found
