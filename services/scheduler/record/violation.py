"""Violations of the contract by plans and results."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from services.common.plan.result_rules import BrokenResult
from services.common.plan.verdict import BrokenPlan, StalePlan


class Violation(Exception):
    """A violation of the contract, with its step, and with its slot and page if they are known."""

    def __init__(
        self, message: str, *, step: int | None = None, slot: int | None = None, page: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.step = step  # None: set by ``violations_of``
        self.slot = slot
        self.page = page

    def __str__(self) -> str:
        parts = (("step", self.step), ("slot", self.slot), ("page", self.page))
        where = ", ".join(f"{name} {value}" for name, value in parts if value is not None)
        return f"{where}: {self.message}" if where else self.message


@contextmanager
def violations_of(step: int) -> Iterator[None]:
    """Raise each breach of the contract in the block as a ``Violation`` of ``step``."""
    try:
        yield
    except (BrokenPlan, StalePlan, BrokenResult) as breach:
        raise Violation(breach.message, step=step, slot=breach.slot) from breach
    except Violation as violation:
        violation.step = step
        raise


def expect_each(
    good: np.ndarray, message: str, *, slots: np.ndarray | None = None, pages: np.ndarray | None = None
) -> None:
    """Raise ``Violation`` about the first of ``slots`` and ``pages`` whose entry in ``good`` is false."""
    if not good.all():
        at = int(good.argmin())
        slot, page = (None if ids is None else int(ids[at]) for ids in (slots, pages))
        raise Violation(message, slot=slot, page=page)


def expect(condition: bool | np.bool_, message: str, *, slot: int | None = None) -> None:
    """Raise ``Violation`` unless ``condition``."""
    if not condition:
        raise Violation(message, slot=slot)
