"""The command ``toka-replay record=FILE_OR_DIR [worker_address=HOST:PORT]``.

It checks that recorded plans keep the contract. With ``worker_address``, it sends the plans of a recording to a worker
again, and compares the tokens.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import grpc
from pydantic import Field

from services.common.config import GrpcFlags, fail, from_command_line
from services.common.errors import InvalidRequest
from services.common.rpc.channel import Dialer
from services.scheduler.record.check import Findings, check_file
from services.scheduler.record.feeding import ReplayOutcome, Unsuitable, feed
from services.scheduler.record.reader import RECORD, Recording, RecordingError, find_recordings


class ReplayConfig(GrpcFlags):
    """Check that recorded plans keep the contract, or replay them on ``worker_address`` and compare the tokens.

    The certificates are those of the link to the worker.
    """

    # Environment variables are for the services. With them, a replay could take over a worker that serves.
    variables: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    record: str = Field(description=RECORD)
    worker_address: str = Field("", description="replay the plans on this worker; default: only check them")


def main() -> None:
    config = from_command_line(ReplayConfig)
    try:
        paths = find_recordings(config.record)
        address, dialer = config.worker_address, Dialer.of(config)
        good = replay(paths, address, dialer) if address else check_all(paths)
    except (InvalidRequest, RecordingError) as error:
        fail(str(error))
    sys.exit(0 if good else 1)


def check_all(paths: list[Path]) -> bool:
    """Check each recording and print the findings. The last line is a JSON object.

    Return True if there is a plan, every plan keeps the contract, and no file is damaged.
    """
    found = []
    for path in paths:
        found.append(check_file(path))
        _print_findings(path, found[-1])
    total = {
        name: sum(getattr(findings, name) for findings in found)
        for name in ("plans", "tokens", "admissions", "failures")
    }
    if not total["plans"] and all(findings.good for findings in found):
        print("nothing to check: no plan was recorded")
    summary = {"files": len(found), "damaged": sum(bool(findings.damage) for findings in found)} | total
    summary["sequences"] = len(set().union(*(findings.sequences for findings in found)))
    summary["peak_pages"] = max(findings.peak_pages for findings in found)
    summary["violations"] = [findings.violation for findings in found if findings.violation]
    print(json.dumps(summary))
    return total["plans"] > 0 and all(findings.good for findings in found)


def replay(paths: list[Path], worker_address: str, dialer: Dialer) -> bool:
    """Replay a recording and print the first differences. The last line is a JSON object.

    Return True if there are results to compare, and none differs. Raises ``RecordingError``.
    """
    if len(paths) != 1:
        names = "\n  ".join(map(str, paths))
        raise RecordingError(f"only one recording can be replayed at a time; choose one of\n  {names}")
    recording = Recording(paths[0])
    try:
        outcome = feed(recording, worker_address, dialer)
    except Unsuitable as error:
        fail(str(error))
    except grpc.RpcError as error:
        fail(f"worker {worker_address}: {error.code().name}: {error.details()}")
    _print_outcome(outcome, recording)
    return outcome.same and outcome.steps > 0


def _print_findings(path: Path, findings: Findings) -> None:
    print(f"{path}: {findings.ending or 'not read to its end'}")
    if findings.plans:
        print(
            f"  {findings.plans} plans ({findings.unanswered} without an answer), {findings.tokens} tokens sampled,"
            f" {findings.prefilled_tokens} prefilled, {len(findings.sequences)} sequences"
            f" ({findings.admissions} admissions), {findings.peak_pages} pages at most"
        )
    if findings.violation:
        print(f"  VIOLATION {findings.violation}")
    elif findings.damage:
        print(f"  DAMAGED {findings.damage}")
    else:
        print("  every plan keeps the contract" if findings.plans else "  nothing to check: it holds no plan")


def _print_outcome(outcome: ReplayOutcome, recording: Recording) -> None:
    if outcome.mismatch:
        recorded, worker = (
            ", ".join(f"{name}={values[side]!r}" for name, values in outcome.mismatch.items())
            for side in ("recorded", "worker")
        )
        print(f"warning: recorded with {recorded}, and this worker has {worker}: its tokens may differ")
    for line in outcome.differences:
        print(line)
    hidden = outcome.different_steps - len(outcome.differences)
    if hidden > 0:
        print(f"... and {hidden} more steps differ")
    print(f"{recording.path}: {recording.ending}")
    if not outcome.steps:
        print("nothing to compare: no plan in it was answered")
    names = ("steps", "tokens", "different_tokens", "different_failures", "different_steps", "mismatch")
    print(json.dumps({name: value for name, value in asdict(outcome).items() if name in names}))


if __name__ == "__main__":
    main()
