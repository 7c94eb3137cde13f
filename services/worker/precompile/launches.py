"""The kernels that a program would launch, each once for each kind of arguments that Triton compiles it for."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

_ALIGNMENT = 16  # bytes of a pointer, and of an integer, that Triton specialises for


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor: all that Triton asks of one when it compiles."""

    dtype: torch.dtype
    address: int  # modulo the alignment; a tensor of ``meta`` has none, and its memory begins aligned

    def data_ptr(self) -> int:
        return _ALIGNMENT + self.address


class Launch(NamedTuple):
    """A kernel with the arguments of a launch, in which pointers stand for tensors."""

    kernel: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Name the kernel, which cannot be sent to another process."""
        return _launch_of, (self.kernel.__module__, self.kernel.__name__, self.args, self.kwargs)

    def compile(self) -> Any:
        """Compile the kernel for the active driver's target, or find it in Triton's cache; return what Triton does."""
        return self.kernel.run(*self.args, grid=(1,), warmup=True, **self.kwargs)


def _launch_of(module: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Launch:
    return Launch(getattr(importlib.import_module(module), name), args, kwargs)


@contextlib.contextmanager
def recording(take: Callable[[Launch], None]) -> Iterator[None]:
    """Give ``take`` the first launch of each kind until the end of the context. Nothing is launched."""
    found: set[Any] = set()
    launch: Callable[..., Any] = JITFunction.run

    def run(self: Any, *args: Any, grid: object, warmup: bool, **kwargs: Any) -> None:
        noted = Launch(self, [_noted(each) for each in args], {name: _noted(each) for name, each in kwargs.items()})
        if (kind := _kind(noted)) not in found:
            found.add(kind)
            take(noted)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def _noted(argument: Any) -> Any:
    if not torch.is_tensor(argument):
        return argument
    offset = int(argument.storage_offset()) * argument.element_size() if argument.is_meta else argument.data_ptr()
    return Pointer(argument.dtype, offset % _ALIGNMENT)


def _kind(launch: Launch) -> tuple[Any, ...]:
    """What Triton compiles a kernel for; two launches of one kind may still be compiled as one."""
    kernel, given = launch.kernel, dict(launch.kwargs)
    given |= dict(zip(kernel.arg_names, launch.args, strict=False))
    parameters = {parameter.name: parameter for parameter in kernel.params}
    kinds = [(name, _kind_of(value, parameters.get(name))) for name, value in sorted(given.items())]
    return (kernel.__module__, kernel.__name__, *kinds)


def _kind_of(value: Any, parameter: Any) -> Any:
    """``parameter``: None for an option of the compiler."""
    if parameter is None or parameter.is_constexpr or value is None or isinstance(value, bool):
        return value
    if isinstance(value, Pointer):
        return value.dtype, value.address == 0 or parameter.do_not_specialize_on_alignment
    if isinstance(value, int):
        if parameter.do_not_specialize:
            return "integer"
        return value == 1, value % _ALIGNMENT == 0, value.bit_length() > 31
    return type(value)
