"""torch.compile for the model's layers: one layer is compiled, for any number of tokens, and all layers run its code.

Nothing is compiled while serving. A worker without torch.compile does not import the compiler, whose import takes as
long as that of the rest of torch.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from services.common.errors import InvalidRequest
from services.worker.attention.compiled import FIRST_LAYER
from services.worker.models.decoder import DecoderLayer, DecoderModel

# Compilers treat sizes 0 and 1 as constants.
_SMALLEST_DYNAMIC = 2
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # The runner captures CUDA graphs itself, around the whole step.
    "triton.cudagraphs": False,
    # It takes minutes, and the kernels are bound by memory.
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    # Fused operators keep what is between them in float32: faster and closer to the exact result.
    "emulate_precision_casts": False,
    # Checks of every buffer's layout, in Python, at every call.
    "size_asserts": False,
    "alignment_asserts": False,
    # It would copy matrices to rounder sizes. A model's sizes are round.
    "shape_padding": False,
    "comprehensive_padding": False,
}
_MOST_GRAPHS = 32
# Whether the warm-up is over.
_ready = False
# Graphs that were compiled before that.
_expected = 0
# Variants of Triton kernels since then.
_kernels = 0


def compile_model(model: DecoderModel) -> None:
    """Compile the layers of ``model`` in place: one graph for all of them, each for any number of tokens from 2 on.

    A layer that selects tokens (``keep``), a layer without a ``delta`` and each way in which ranks exchange activations
    is a graph of its own. Compilation happens at the first calls, which are the warm-up's. One token, or one kept
    token, takes a further graph: on CUDA, batches are padded.
    """
    import torch._dynamo

    global _ready
    _ready = False
    # The default of 8 is too low for models with several exchanges.
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    # Compilers suggest to compute float32 with fewer bits. A model in float32 is to keep them all.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    compiled = torch.compile(DecoderLayer.forward, dynamic=True, fullgraph=True, options=_OPTIONS)

    def run_layer(layer: DecoderLayer, index: int, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not _ready:
            for each in arguments:
                # Otherwise sizes that happen to be equal at the first call are taken to be always equal.
                if isinstance(each, torch.Tensor) and each.shape[0] >= _SMALLEST_DYNAMIC:
                    torch._dynamo.mark_dynamic(each, 0)
        outcome: tuple[torch.Tensor, torch.Tensor | None] = compiled(layer, index + FIRST_LAYER, *arguments)
        return outcome

    model.run_layer = run_layer


def compilations() -> int:
    """Return how many graphs torch.compile has made in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0


def mark_ready() -> None:
    """End the warm-up: count what is compiled from now on as recompilations."""
    global _ready, _expected, _kernels
    _ready, _expected, _kernels = True, compilations(), 0
    if "triton" in sys.modules:  # else no kernel of ours was made: on CPUs it may not even be installed
        sys.modules["triton"].knobs.runtime.jit_post_compile_hook = _count_kernel


def recompilations() -> int:
    """Return how many graphs were compiled since ``mark_ready``."""
    return compilations() - _expected


def kernel_compilations() -> int:
    """Return how many variants of our Triton kernels were made since ``mark_ready``.

    A variant is made for arguments of a kind that the warm-up did not have. A variant that was found on disk counts as
    well: loading it delayed a step. Only the compute thread makes variants.
    """
    return _kernels


def _count_kernel(**_: object) -> None:
    global _kernels
    _kernels += 1


def forbid_recompilation() -> contextlib.AbstractContextManager[None]:
    """Have every thread raise ``RuntimeError``, which names the guard that failed, instead of compiling. Used as a
    context manager, it ends with the context."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


@contextlib.contextmanager
def refusing_what_cannot_be_compiled() -> Iterator[None]:
    """Turn a failure of torch's compiler, such as a missing C++ compiler, into ``InvalidRequest``."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise InvalidRequest(
            f"flag torch_compile=T: torch cannot compile here ({str(error).strip().splitlines()[0]});"
            " install a C++ compiler or leave the flag out",
            field="torch_compile",
        ) from error
