"""The packages that ``make mutants`` changes, and the tests that run for each of them."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Room:
    """A package or module, and the tests that must notice its defects."""

    path: str
    tests: tuple[str, ...]  # glob patterns of test files. They run in this order, so the fastest come first

    def test_files(self) -> list[str]:
        """Return the test files. Raises ``LookupError`` if a pattern matches no file."""
        files: list[str] = []
        for pattern in self.tests:
            found = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))
            if not found:
                raise LookupError(f"tests/rooms.py: {pattern}, of {self.path}, matches no file; correct its name")
            files += (file for file in found if file not in files)
        return files


def _gateway(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/gateway/{name}.py" for name in names)


ROOMS = {
    "core": Room(
        "services/scheduler/core",
        ("tests/scheduler/core/test_*.py", "tests/scheduler/test_*.py", "tests/scheduler/record/test_*.py"),
    ),
    "api": Room("services/scheduler/api", ("tests/scheduler/test_*.py",)),
    "engine": Room(
        "services/gateway/engine",
        (
            *_gateway("test_session", "test_active_request", "test_routing", "test_sample_slots", "test_numbers"),
            *_gateway("test_text", "test_answer", "test_metrics", "test_trace", "test_completions", "test_streaming"),
            *_gateway("access/test_bounds", "test_fleet", "test_broken_links", "test_failover", "test_poison"),
            *_gateway("test_lost_schedulers", "test_recovery"),
        ),
    ),
    "launcher": Room(
        "services/launcher/supervisor.py", ("tests/launcher/test_supervisor.py", "tests/e2e/test_toka.py")
    ),
}
