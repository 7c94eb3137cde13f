"""Violations of the contract by plans and results."""

import numpy as np


class Violation(Exception):
    """A violation of the contract, with its step, and with its slot and page if they are known."""

    def __init__(self, message: str, *, slot: int | None = None, page: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.step: int | None = None  # set by the checker
        self.slot = slot
        self.page = page

    def __str__(self) -> str:
        parts = (("step", self.step), ("slot", self.slot), ("page", self.page))
        where = ", ".join(f"{name} {value}" for name, value in parts if value is not None)
        return f"{where}: {self.message}" if where else self.message


class PlanViolation(Violation):
    """The plan violates the contract, or reads or writes pages that it must not."""


class ResultViolation(Violation):
    """The result does not fit the plan."""


def require_each(
    good: np.ndarray, message: str, *, slots: np.ndarray | None = None, pages: np.ndarray | None = None
) -> None:
    """Raise ``PlanViolation`` about the first of ``slots`` and ``pages`` whose entry in ``good`` is false."""
    if not good.all():
        at = int(good.argmin())
        slot, page = (None if ids is None else int(ids[at]) for ids in (slots, pages))
        raise PlanViolation(message, slot=slot, page=page)


def expect_each(good: np.ndarray, message: str, *, slots: np.ndarray) -> None:
    """Raise ``ResultViolation`` about the first of ``slots`` whose entry in ``good`` is false."""
    if not good.all():
        raise ResultViolation(message, slot=int(slots[int(good.argmin())]))


def expect(condition: bool | np.bool_, message: str, *, slot: int | None = None) -> None:
    """Raise ``ResultViolation`` unless ``condition``."""
    if not condition:
        raise ResultViolation(message, slot=slot)
