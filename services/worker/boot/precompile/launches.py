"""The kernels that a program would launch, each once for each specialisation that Triton compiles."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes of a pointer, and of an integer, that Triton specialises for


@dataclass(frozen=True)
class Pointer:
    """A substitute for a tensor, with what Triton reads of a tensor when it compiles."""

    dtype: torch.dtype
    address: int  # modulo the alignment; memory of ``meta`` has no address and counts as aligned

    def data_ptr(self) -> int:
        return _ALIGNMENT + self.address


class Launch(NamedTuple):
    """A kernel with the arguments of a launch, in which pointers stand for tensors."""

    kernel: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the kernel as its module and name, since Triton's object cannot be pickled."""
        return _launch_of, (self.kernel.__module__, self.kernel.__name__, self.args, self.kwargs)

    def compile(self) -> Any:
        """Compile the kernel for the active driver's target, or find it in Triton's cache. Return Triton's result."""
        return self.kernel.run(*self.args, grid=(1,), warmup=True, **self.kwargs)


def _launch_of(module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
    return Launch(getattr(importlib.import_module(module), name), args, kwargs)


@contextlib.contextmanager
def recording(on_launch: Callable[[Launch], None]) -> Iterator[None]:
    """Call ``on_launch`` with the first launch of each specialisation. Launch nothing until the end of the context."""
    found: set[Any] = set()
    original: Callable[..., Any] = JITFunction.run

    def run(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        values = {name: _without_memory(value) for name, value in kwargs.items()}
        launch = Launch(self, [_without_memory(value) for value in args], values)
        if (key := _specialisation(launch)) not in found:
            found.add(key)
            on_launch(launch)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


def _without_memory(argument: Any) -> Any:
    """Return ``argument``, or a ``Pointer`` in place of a tensor, which a descriptor may describe."""
    if isinstance(argument, TensorDescriptor):
        return replace(argument, base=_without_memory(argument.base))
    if not torch.is_tensor(argument):
        return argument
    offset = int(argument.storage_offset()) * argument.element_size() if argument.is_meta else argument.data_ptr()
    return Pointer(argument.dtype, offset % _ALIGNMENT)


def _specialisation(launch: Launch) -> tuple[Any, ...]:
    """Return a key of what Triton compiles the kernel for. Triton may compile one kernel for several keys."""
    kernel, given = launch.kernel, dict(launch.kwargs)
    given |= dict(zip(kernel.arg_names, launch.args, strict=False))
    parameters = {parameter.name: parameter for parameter in kernel.params}
    keys = [(name, _key(value, parameters.get(name))) for name, value in sorted(given.items())]
    return (kernel.__module__, kernel.__name__, *keys)


def _key(value: Any, parameter: Any) -> Any:
    """Return what Triton specialises for in ``value``. ``parameter`` is None for an option of the compiler."""
    if parameter is None or parameter.is_constexpr or value is None or isinstance(value, bool):
        return value
    if isinstance(value, Pointer):
        return value.dtype, value.address == 0 or parameter.do_not_specialize_on_alignment
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, tuple(value.block_shape), value.layout
    if isinstance(value, int):
        if parameter.do_not_specialize:
            return "integer"
        return value == 1, value % _ALIGNMENT == 0, value.bit_length() > 31
    return type(value)
