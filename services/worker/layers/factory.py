"""Choice of the operators that a model is built with."""

from collections.abc import Sequence
from functools import partial

import torch

from services.common.errors import InvalidRequest
from services.worker.described.config import ModelConfig
from services.worker.described.forms import LayerForm, WeightForm
from services.worker.described.refusals import refuse_integer_weights
from services.worker.layers.block_fp8 import BlockFp8Linear
from services.worker.layers.fp8 import Fp8Linear, refuse_unquantizable
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.integers import IntegerLinear
from services.worker.layers.kernels import LayerKernels, TorchKernels
from services.worker.layers.linear import LayerLinears, Linear, LinearMaker


def make_linear(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, quantization: str, tp_size: int = 1
) -> LinearMaker:
    """Return the constructor of linear layers for ``quantization``, which is ``none``, ``fp8``, ``int8`` or ``int4``.

    ``config`` describes the share of each of ``tp_size`` ranks. Raises ``InvalidRequest`` if the model or the device
    does not support ``quantization``.
    """
    if quantization == "fp8":
        refuse_unquantizable(config, dtype, device, tp_size)
        return partial(Fp8Linear, dtype=dtype)
    if quantization in ("int8", "int4"):
        refuse_integer_weights(config, quantization, tp_size)
        bits = int(quantization.removeprefix("int"))
        if device.type == "cuda":
            return _make_grouped(dtype, bits)
        from services.worker.layers import products_cpu  # noqa: F401  the operator; loads numba

        return partial(IntegerLinear, bits=bits)
    # On CUDA the weight has the checkpoint's layout, because tensor cores read both factors along their rows.
    return partial(Linear, transposed=True) if device.type == "cuda" else Linear


def _make_grouped(dtype: torch.dtype, bits: int) -> LinearMaker:
    if dtype == torch.float32:
        raise InvalidRequest(
            f"flag quantization=int{bits}: on cuda, products of integer weights take inputs of 16 bits, but dtype is"
            " float32; use dtype=bfloat16 or quantization=none",
            field="quantization",
        )
    from services.worker.layers import triton_grouped  # noqa: F401  the operator; loads Triton

    return partial(GroupedLinear, bits=bits)


def make_kept_linears(form: LayerForm, dtype: torch.dtype, device: torch.device) -> LayerLinears:
    """Return the constructors for a layer that keeps weights as a checkpoint has them, in ``form``.

    ``device`` is a GPU, or a CPU that computes a reference.
    """
    return LayerLinears(*(_make_kept(each, dtype, device) for each in form.forms))


def _make_kept(form: WeightForm, dtype: torch.dtype, device: torch.device) -> LinearMaker:
    if form.kind == "fp8":
        return partial(Fp8Linear, dtype=dtype)
    if form.kind == "fp8_blocks":
        if device.type == "cuda":
            from services.worker.layers import triton_block_fp8  # noqa: F401  the operator; loads Triton
        return partial(BlockFp8Linear, dtype=dtype)
    if form.kind == "dtype":
        return partial(Linear, transposed=True)
    if form.kind == "mxfp4":
        return partial(GroupedLinear, bits=form.bits, group=form.group, floats=True)

    if device.type == "cuda":
        from services.worker.layers import triton_grouped  # noqa: F401  the operator; loads Triton

    def grouped(inputs: int, outputs: int | Sequence[int], bias: bool) -> GroupedLinear:
        return GroupedLinear(
            inputs,
            outputs,
            bias,
            bits=form.bits,
            group=form.group or inputs,
            offsets=form.offsets,
            ordered=form.ordered,
        )

    return grouped


def make_kernels(device: torch.device, dtype: torch.dtype, *, compiled: bool = False) -> LayerKernels:
    """Return the fastest operators for ``device`` and ``dtype``. ``compiled`` is true for use with torch.compile."""
    if device.type == "cpu" and dtype == torch.float32 and not compiled:
        from services.worker.layers.fast_cpu import FastCpuKernels  # loads numba

        return FastCpuKernels()
    if device.type == "cuda":
        from services.worker.layers.cuda_kernels import CudaKernels  # loads Triton

        return CudaKernels()
    return TorchKernels()
