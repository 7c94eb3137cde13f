"""Linear layers whose weights compiled functions read by their addresses."""

import torch

from services.worker.layers.integers import IntegerLinear
from services.worker.layers.linear import AnyLinear
from services.worker.layers.panels import PanelLinear
from services.worker.layers.products_cpu import WeightStorage

WithAddress = IntegerLinear | PanelLinear


def storage_of(linear: AnyLinear) -> WeightStorage:
    """Return the storage of the weight, as ``make_product`` takes it."""
    if isinstance(linear, IntegerLinear):
        return "int8" if linear.bits == 8 else "int4"
    return "bfloat16" if linear.weight.dtype == torch.bfloat16 else "float32"


def addresses(linear: AnyLinear) -> tuple[int, int]:
    """Return the addresses of the weight and of its scales, which are 0 without scales."""
    if not isinstance(linear, WithAddress):
        raise TypeError(f"{type(linear).__name__} has no addresses; use the model itself")
    return linear.weight.data_ptr(), linear.scale.data_ptr() if isinstance(linear, IntegerLinear) else 0
