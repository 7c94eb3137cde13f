"""Choice of the cases of a test that ``make test`` runs. ``make test-all`` runs the other cases too."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_if(is_quick: Callable[..., object], cases: Iterable[Any]) -> list[Any]:
    """Return ``cases`` for ``pytest.mark.parametrize``, and mark each case slow for which ``is_quick`` is false.

    ``is_quick`` gets the values of a case as arguments. At least one case must be quick.
    """
    found, count = [], 0
    for case in cases:
        values = case if type(case) is tuple else (case,)  # a named tuple is one value
        if is_quick(*values):
            count += 1
            found.append(case)
        else:
            found.append(pytest.param(*values, marks=pytest.mark.slow))
    assert count, "make test would run no case"
    return found
