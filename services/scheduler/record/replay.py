"""``toka-replay record=FILE_OR_DIR``: do the plans keep the contract? With ``worker_address=HOST:PORT``: does a worker
that is given the plans of one recording again answer the same tokens?
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import grpc
from pydantic import Field

from services.common.flags import Config
from services.scheduler.record.check import Findings, check
from services.scheduler.record.command import fail, read_flags
from services.scheduler.record.feeding import Outcome, Unsuitable, feed
from services.scheduler.record.reader import Recording, RecordingError, open_recordings


class ReplayConfig(Config):
    """The flags."""

    record: str = Field("", description="a recording (*.tkrec), or a directory of them")
    worker_address: str = Field("", description="feed the plans to this worker; default: check them only")


def main() -> None:
    config = read_flags(ReplayConfig, __doc__)
    if not config.record:
        fail("give record=FILE_OR_DIR: what the scheduler wrote with record_plans=DIR", status=2)
    try:
        recordings = open_recordings(config.record)
        good = replay(recordings, config.worker_address) if config.worker_address else check_all(recordings)
    except RecordingError as error:
        fail(str(error))
    sys.exit(0 if good else 1)


def check_all(recordings: list[Recording]) -> bool:
    """Print what is in each; True when none has a violation. The last line is one JSON object."""
    found = [check(recording) for recording in recordings]
    for recording, findings in zip(recordings, found, strict=True):
        _print_findings(recording.path, findings)
    total = {
        name: sum(getattr(findings, name) for findings in found)
        for name in ("plans", "tokens", "admissions", "failures")
    }
    total["sequences"] = len(set().union(*(findings.sequences for findings in found)))
    violations = [findings.violation for findings in found if findings.violation]
    peak = max(findings.peak_pages for findings in found)
    print(json.dumps({"files": len(found)} | total | {"peak_pages": peak, "violations": violations}))
    return not violations


def replay(recordings: list[Recording], worker_address: str) -> bool:
    """Print the first differences; True when there are none. The last line is one JSON object."""
    if len(recordings) != 1:
        names = "\n  ".join(str(recording.path) for recording in recordings)
        raise RecordingError(f"a worker is fed one recording at a time; choose one of\n  {names}")
    try:
        outcome = feed(recordings[0], worker_address)
    except Unsuitable as error:
        fail(str(error))
    except grpc.RpcError as error:
        fail(f"worker {worker_address}: {error.code().name}: {error.details()}")
    _print_outcome(outcome, recordings[0])
    return outcome.same


def _print_findings(path: Path, findings: Findings) -> None:
    print(f"{path}: {findings.ending or 'not read to its end'}")
    print(
        f"  {findings.plans} plans ({findings.unanswered} without an answer), {findings.tokens} tokens sampled,"
        f" {findings.prefilled_tokens} prefilled, {len(findings.sequences)} sequences"
        f" ({findings.admissions} admissions), {findings.peak_pages} pages at most"
    )
    print(f"  VIOLATION {findings.violation}" if findings.violation else "  every plan keeps the contract")


def _print_outcome(outcome: Outcome, recording: Recording) -> None:
    for line in outcome.differences:
        print(line)
    hidden = outcome.different_steps - len(outcome.differences)
    if hidden > 0:
        print(f"... and {hidden} more steps differ")
    if outcome.model != recording.info.model:
        print(f"recorded with the model {recording.info.model!r}; this worker has {outcome.model!r}")
    print(f"{recording.path}: {recording.ending}")
    names = ("steps", "tokens", "different_tokens", "different_failures", "different_steps")
    print(json.dumps({name: value for name, value in asdict(outcome).items() if name in names}))


if __name__ == "__main__":
    main()
