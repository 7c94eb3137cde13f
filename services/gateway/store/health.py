"""Problems of the store: diagnosis, advice for the operator, and a log without repetitions."""

import sqlite3
from collections.abc import Callable
from typing import Literal, NamedTuple

import structlog

from services.common.errors import StoreUnavailable
from services.gateway.engine.metrics import StoreProblem

log = structlog.get_logger(__name__)

StorePart = Literal["database", "files"]

_PRIMARY_CODE = 0xFF  # of SQLite's extended result codes


class _Diagnosis(NamedTuple):
    problem: StoreProblem
    sentence: str  # what is wrong with the database at {path}, and what to do


_DAMAGED = _Diagnosis(
    "damaged",
    "the database {path} is damaged ({error}); stop the gateways, move it away with its -wal and -shm files, and put a"
    " copy in its place, or nothing to begin with an empty store",
)
_LOCKED = _Diagnosis(
    "locked",
    "the store does not answer: another process has locked the database {path} ({error}); end that process, which"
    " 'fuser {path}' names",
)
_FULL = _Diagnosis("full", "the disk of the database {path} is full ({error}); free some space")
_READ_ONLY = _Diagnosis(
    "read_only",
    "the database {path} cannot be written ({error}); let the gateway's user write to the file and to its directory",
)
_MISSING = _Diagnosis(
    "missing",
    "the database {path} cannot be opened ({error}); let the gateway's user read and write the file and its directory",
)
_BY_CODE = {  # SQLite's primary result codes
    sqlite3.SQLITE_CORRUPT: _DAMAGED,
    sqlite3.SQLITE_NOTADB: _DAMAGED,
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: _MISSING,
    sqlite3.SQLITE_IOERR: _Diagnosis(
        "error",
        "the disk of the database {path} does not work ({error}); see the log of its host's kernel",
    ),
}


class _Problem(NamedTuple):
    part: StorePart
    problem: StoreProblem
    writing: bool  # found by a write: reads may still work


class StoreHealth:
    """Logs each problem of the store once, and again if it returns after the store has worked.

    Damage counts as solved only when the file is replaced, since most of a damaged database can still be read.
    ``count`` is called for every occurrence of a problem.
    """

    def __init__(self, count: Callable[[StoreProblem], None] = lambda _: None) -> None:
        self._count = count
        self._logged: dict[_Problem, str] = {}

    def record_problem(
        self, part: StorePart, problem: StoreProblem, message: str, *, writing: bool
    ) -> StoreUnavailable:
        """Record a problem. Return the error to raise."""
        self._count(problem)
        found = _Problem(part, problem, writing)
        if not any(each.part == part and each.problem == problem for each in self._logged):
            log.error("store unavailable", problem=problem, reason=message)
            self._logged[found] = message
        return StoreUnavailable(message)

    def record_success(self, part: StorePart, *, writing: bool) -> None:
        """Record that the store was read or written."""
        if self._logged:
            self._solve(lambda each: each.part == part and each.problem != "damaged" and writing >= each.writing)

    def record_replacement(self) -> None:
        """Record that the database file was replaced."""
        self._solve(lambda each: each.part == "database")

    def _solve(self, is_solved: Callable[[_Problem], bool]) -> None:
        for each in [each for each in self._logged if is_solved(each)]:
            del self._logged[each]
            log.info("store available again", problem=each.problem)


def diagnose(error: BaseException, path: str) -> tuple[StoreProblem, str] | None:
    """Return the problem behind an error of SQLite, and a sentence about it, or None for other errors."""
    code = getattr(error, "sqlite_errorcode", None)
    found = None if code is None else _BY_CODE.get(code & _PRIMARY_CODE)
    return None if found is None else (found.problem, found.sentence.format(path=path, error=error))
