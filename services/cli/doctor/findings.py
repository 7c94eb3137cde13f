"""What one look found."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    UNKNOWN = "unknown"  # it could not be looked at, or is of no use here
    WARN = "warn"  # the start may work, with less than it could have
    FAIL = "fail"  # the start does not work


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    subject: str
    level: Level
    text: str
    fix: str = ""  # what to do; never empty for WARN and FAIL
    facts: dict[str, Any] = field(default_factory=dict)  # for programs


def ok(subject: str, text: str, **facts: Any) -> Finding:
    return Finding(subject, Level.OK, text, facts=facts)


def unknown(subject: str, text: str, fix: str = "") -> Finding:
    return Finding(subject, Level.UNKNOWN, text, fix)


def warn(subject: str, text: str, fix: str, **facts: Any) -> Finding:
    return Finding(subject, Level.WARN, text, fix, facts)


def fail(subject: str, text: str, fix: str, **facts: Any) -> Finding:
    return Finding(subject, Level.FAIL, text, fix, facts)


def from_error(subject: str, message: str) -> Finding:
    """Of an error of ours, whose sentence ends with what to do."""
    text, _, fix = message.rpartition("; ")
    return fail(subject, text or message, fix if text else "see above")


def amount(count: float) -> str:
    """``1.5 GiB``, or ``3.0 MiB``. ``count``: bytes."""
    return f"{count / 2**30:,.1f} GiB" if abs(count) >= 2**29 else f"{count / 2**20:,.1f} MiB"
