"""torch.compile for the model's layers, for any number of tokens.

Only one layer of a native model is compiled, and all layers run its code.

All compilation ends with the boot. A worker without torch.compile does not import the compiler, because this takes as
long as importing the rest of torch.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from services.common.errors import InvalidRequest
from services.worker.models.base import RankModel

# Compilers treat sizes 0 and 1 as constants.
_SMALLEST_DYNAMIC = 2
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # The runner captures CUDA graphs itself, around the whole step.
    "triton.cudagraphs": False,
    # Autotuning takes minutes, and the kernels are bound by memory.
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    # Fused operators keep intermediate values in float32, which is faster and more precise.
    "emulate_precision_casts": False,
    # These would check the layout of every buffer in Python at every call.
    "size_asserts": False,
    "alignment_asserts": False,
    # Padding would copy matrices to multiples of powers of two, which the sizes of a model already are.
    "shape_padding": False,
    "comprehensive_padding": False,
}
_MOST_GRAPHS = 32
_ready = False  # the warm-up has ended
_expected = 0  # graphs that the warm-up compiled
_kernels = 0  # variants of Triton kernels that were made since the warm-up


def compile_model(model: RankModel) -> None:
    """Replace the layers of ``model`` by compiled graphs, for any number of tokens from 2 on.

    Compilation happens at the first calls, in the warm-up. A layer that selects tokens (``keep``), a layer without a
    ``delta`` and each strategy of exchanging activations compile a separate graph. So does a step of one token or one
    kept token; CUDA has no such steps, because their batches are padded.
    """
    import torch._dynamo

    global _ready
    _ready = False
    # The default of 8 is too low for models with several exchanges.
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    # Compilers suggest to compute float32 with fewer bits. The results of a float32 model must keep full precision.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    model.compile_layers(_compiled)
    model.compiled = True


def _compiled(function: Callable[..., Any], dimension: int) -> Callable[..., Any]:
    """Return ``function`` as one compiled graph. ``dimension`` of its tensors is the number of tokens."""
    compiled = torch.compile(function, dynamic=True, fullgraph=True, options=_OPTIONS)

    def run(*arguments: Any, **named: Any) -> Any:
        if not _ready:
            for each in (*arguments, *named.values()):
                # Otherwise the compiler assumes that sizes which are equal at the first call are always equal.
                if isinstance(each, torch.Tensor) and each.shape[dimension] >= _SMALLEST_DYNAMIC:
                    torch._dynamo.mark_dynamic(each, dimension)
        return compiled(*arguments, **named)

    return run


def compilations() -> int:
    """Return how many graphs torch.compile has made in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0


def mark_ready() -> None:
    """End the warm-up: count what is compiled from now on as recompilations."""
    global _ready, _expected, _kernels
    _ready, _expected, _kernels = True, compilations(), 0
    if "triton" in sys.modules:  # not loaded on CPUs, where it may not be installed
        sys.modules["triton"].knobs.runtime.jit_post_compile_hook = _count_kernel


def recompilations() -> int:
    """Return how many graphs were compiled since ``mark_ready``."""
    return compilations() - _expected


def kernel_compilations() -> int:
    """Return how many variants of Triton kernels were made since ``mark_ready``.

    A variant is made when a kernel has arguments of a kind that did not occur in the warm-up. A variant from the disk
    cache counts as well, because loading it delays a step. Only the compute thread makes variants.
    """
    return _kernels


def _count_kernel(**_: object) -> None:
    global _kernels
    _kernels += 1


def forbid_recompilation() -> contextlib.AbstractContextManager[None]:
    """Make every thread raise ``RuntimeError`` with the failed guard instead of compiling.

    This is permanent, unless the result is used as a context manager.
    """
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


@contextlib.contextmanager
def refusing_what_cannot_be_compiled() -> Iterator[None]:
    """Turn a failure of torch's compiler into ``InvalidRequest``.

    A C++ compiler may be missing, or the model's code may depend on values.
    """
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        yield
    except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
        raise InvalidRequest(
            f"flag torch_compile=T: torch cannot compile this model here ({str(error).strip().splitlines()[0]});"
            " install a C++ compiler if there is none, or leave the flag out",
            field="torch_compile",
        ) from error
