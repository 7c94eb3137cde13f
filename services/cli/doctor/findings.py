"""Results of checks."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    UNKNOWN = "unknown"  # could not be checked, or does not apply
    WARN = "warn"  # the start may work, with restrictions
    FAIL = "fail"  # the start would fail


@dataclass(frozen=True)
class Finding:
    """Line of the report."""

    subject: str
    level: Level
    text: str
    fix: str = ""  # the remedy; never empty for WARN and FAIL
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
    """Return a finding for an error whose message ends with the remedy."""
    text, _, fix = message.rpartition("; ")
    return fail(subject, text or message, fix if text else "see above")


def amount(count: float) -> str:
    """Format a number of bytes: ``1.5 GiB`` or ``3.0 MiB``."""
    return f"{count / 2**30:,.1f} GiB" if abs(count) >= 2**29 else f"{count / 2**20:,.1f} MiB"
