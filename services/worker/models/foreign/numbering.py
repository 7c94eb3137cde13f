"""Positions that the code of a model counts itself, as ``torch.arange`` over the tokens of a batch.

A flattened batch has tokens of several sequences, so such a count is wrong. A run without weights finds the calls of
``arange`` on whose values the attention or the result depends. In a step, these calls return the tokens' positions.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from services.worker.models.foreign.products import tensors_in

_CALLS = "tokasaurus_arange_calls"  # attribute of a tensor: the calls of ``arange`` on whose values it depends
_NONE: frozenset[int] = frozenset()
# Functions whose indices select from tokens, which is no use of the values of the indices.
_SELECTIONS = (torch.Tensor.__getitem__, torch.index_select, torch.Tensor.index_select, torch.gather)


def calls_of(tensor: torch.Tensor) -> frozenset[int]:
    """Return the calls of ``arange``, by their number in the run, on whose values ``tensor`` depends."""
    calls: frozenset[int] = getattr(tensor, _CALLS, _NONE)
    return calls


class RecordedNumbering(TorchFunctionMode):
    """Records in each tensor the calls of ``arange`` over ``tokens`` tokens on whose values it depends."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens, self._count = tokens, 0

    def __torch_function__(
        self, function: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        if function is torch.arange:
            if made.numel() == self._tokens:
                setattr(made, _CALLS, frozenset([self._count]))
            self._count += 1
            return made
        read: Any = (args, kwargs or {})
        if function in _SELECTIONS and self._tokens in args[0].shape:
            read = args[0]
        calls = _NONE.union(*(calls_of(each) for each in tensors_in(read)))
        if calls:
            changed = args[0] if function is torch.Tensor.__setitem__ else made
            for each in tensors_in(changed):
                setattr(each, _CALLS, calls | calls_of(each))
        return made


class StepNumbering(TorchFunctionMode):
    """Makes some calls of ``arange`` in a step return the positions of its tokens."""

    def __init__(self, calls: Collection[int], positions: torch.Tensor) -> None:
        """Return ``positions [tokens]`` int64 from ``calls``, the numbers of calls in a step."""
        super().__init__()
        self._calls, self._positions, self._count = calls, positions, -1

    def __torch_function__(
        self, function: Any, types: Collection[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.arange:
            self._count += 1
            if self._count in self._calls:
                return self._positions.to((kwargs or {}).get("dtype") or torch.int64)
        return function(*args, **(kwargs or {}))
