"""torch.compile for the model's forward pass: once for every number of tokens, and never while serving.

A worker that compiles nothing does not load the compiler, which takes as long as the rest of torch.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from services.common.errors import InvalidRequest
from services.worker.attention.base import AttentionStep, RotatingAttentionStep
from services.worker.models.decoder import DecoderModel
from services.worker.parallel.exchange import ALONE, Exchange

# Compilers treat sizes 0 and 1 as constants.
_SMALLEST_DYNAMIC = 2
_OPTIONS: dict[str, str | int | bool | Callable[..., Any]] = {
    # Graphs are captured around the whole step, by us.
    "triton.cudagraphs": False,
    # Minutes of tuning for kernels that are bound by memory.
    "max_autotune": False,
    "coordinate_descent_tuning": False,
    # Fused operators keep what is between them in float32: faster and closer to the exact result.
    "emulate_precision_casts": False,
    # Checks of every buffer's layout, in Python, at every call.
    "size_asserts": False,
    "alignment_asserts": False,
    # Copies of matrices to rounder sizes; a model's are round.
    "shape_padding": False,
    "comprehensive_padding": False,
}
_MOST_GRAPHS = 32
# Graphs that were compiled before the worker was ready.
_expected = 0
# Triton kernels since then; compiled by the compute thread only.
_kernels = 0


def compile_model(model: DecoderModel) -> None:
    """Compile ``model`` in place, in two graphs, without and with ``keep``, each for any number of tokens from 2 on;
    where ranks exchange activations in several ways, in two for each of these.

    It happens at the first calls, which are the warm-up's. A number of tokens or of kept ones below 2 is a further
    graph: on CUDA batches are padded.
    """
    import torch._dynamo

    # Two for each way to exchange, and for batches of one token; the default of 8 would be just enough.
    torch._dynamo.config.recompile_limit = _MOST_GRAPHS
    # The compiler would have float32 computed with fewer bits; who asks for float32 wants them all.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
    compiled = torch.compile(model.forward, dynamic=True, fullgraph=True, options=_OPTIONS)

    def forward(
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionStep | RotatingAttentionStep,
        keep: torch.Tensor | None = None,
        exchange: Exchange = ALONE,
    ) -> torch.Tensor:
        for tensor in (inputs, positions, keep):
            # Sizes that are equal by chance at the first call are so taken for different ones.
            if tensor is not None and tensor.shape[0] >= _SMALLEST_DYNAMIC:
                torch._dynamo.mark_dynamic(tensor, 0)
        return compiled(inputs, positions, attention, keep, exchange)

    model.forward = forward  # type: ignore[method-assign]  # what a call of the module runs


def compilations() -> int:
    """Graphs that torch.compile has made in this process, the model's and all others."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler.counters["stats"]["unique_graphs"] if compiler else 0


def mark_ready() -> None:
    """The warm-up is over: what is compiled from here on is a recompilation."""
    global _expected, _kernels
    _expected, _kernels = compilations(), 0
    if "triton" in sys.modules:  # else no kernel of ours was made: on CPUs it may not even be installed
        sys.modules["triton"].knobs.runtime.jit_post_compile_hook = _count_kernel


def recompilations() -> int:
    """Graphs compiled since ``mark_ready``."""
    return compilations() - _expected


def kernel_compilations() -> int:
    """Variants of our Triton kernels made since ``mark_ready``: arguments of a kind that the warm-up did not have. One
    that was found on disk counts, too: it held up a step all the same."""
    return _kernels


def _count_kernel(**_: object) -> None:
    global _kernels
    _kernels += 1


def forbid_recompilation() -> contextlib.AbstractContextManager[None]:
    """From here on, in every thread, raises ``RuntimeError``, naming what differs, instead of compiling; as a context
    until its end."""
    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("fail_on_recompile")
    return stance


@contextlib.contextmanager
def refusing_what_cannot_be_compiled() -> Iterator[None]:
    """Around those first calls: raises ``InvalidRequest`` where torch finds no compiler or fails with it."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as error:
        raise InvalidRequest(
            f"flag torch_compile=T: torch cannot compile here ({str(error).strip().splitlines()[0]});"
            " install a C++ compiler or leave the flag out",
            field="torch_compile",
        ) from error
