"""Registration of operators that torch.compile does not look into, so that a compiled model stays one graph."""

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")

_NAMESPACE = "tokasaurus"
_library = torch.library.Library(_NAMESPACE, "FRAGMENT")


def operator(
    schema: str, fake: Callable[..., Any], device: str = "CompositeExplicitAutograd"
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that registers a function as an operator of ``torch.ops.tokasaurus``.

    ``schema`` is the name and the types in torch's notation. ``fake`` takes the same arguments and returns results of
    the same shapes and dtypes without data. ``device`` is a dispatch key of torch, by default for all devices.

    ``torch.library.custom_op`` would also check effects on arguments, which takes a millisecond for 16 layers.
    """

    def register(function: Callable[P, T]) -> Callable[P, T]:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, function, device)
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)
        return function

    return register
