"""Checks that reject flags and models which a kind of device does not support.

Each function raises ``InvalidRequest``. Without torch, so that ``toka-doctor`` can run them before a start.
"""

from collections.abc import Mapping
from pathlib import Path

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import cuda_only
from services.worker.described.config import ModelConfig
from services.worker.described.forms import FP8_MULTIPLE
from services.worker.described.memory import INTEGER_GROUP

# First compute capability for which Triton converts from and to float8_e4m3fn.
_FP8_CONVERSIONS = (8, 9)
# First compute capability with fp8 matrix products that take one scale per row.
ROW_WISE_PRODUCTS = (9, 0)
# Largest head of the kernels for CUDA.
_MOST_CUDA_HEAD_DIM = 256
_NUMBA_SETTINGS = Path(".numba_config.yaml")


def refuse_cuda_only_flags(config: WorkerConfig) -> None:
    """Raise ``InvalidRequest`` if a flag is set that only CUDA supports."""
    for name, value, fix in cuda_only(config):
        raise InvalidRequest(f"flag {name}={value}: only on cuda, and this worker runs on cpu; {fix}", field=name)


def refuse_numba_settings() -> None:
    """Raise ``InvalidRequest`` if the current directory has a settings file of numba.

    Numba reads this file without being asked. The file can name the cache directory of numba's compiled code, which is
    pickled. A model directory that contains both could therefore run code in the worker.
    """
    if _NUMBA_SETTINGS.exists():
        raise InvalidRequest(
            f"{_NUMBA_SETTINGS.absolute()}: numba would take its settings from this file in the current directory,"
            " and the name of a directory with code to run; start in another directory, or remove the file"
        )


def refuse_unsupported_cuda_sizes(page_size: int, head_dim: int) -> None:
    """Raise ``InvalidRequest`` if ``page_size`` is not a power of two, or ``head_dim`` is too large.

    ``head_dim`` is that of the checkpoint, which is padded to a power of two. The CUDA kernels index with masks and
    shifts.
    """
    if page_size & (page_size - 1):
        raise InvalidRequest(
            f"flag page_size={page_size}: on cuda it must be a power of two; use 16, for example", field="page_size"
        )
    if head_dim > _MOST_CUDA_HEAD_DIM:
        raise InvalidRequest(
            f"config.json: head_dim={head_dim} is not supported on cuda, where heads have at most"
            f" {_MOST_CUDA_HEAD_DIM} elements; choose another model, or device=cpu",
            field="model",
        )


def refuse_fp8_cache(device: str, capability: tuple[int, int]) -> None:
    """Raise ``InvalidRequest`` if the device named ``device`` cannot convert from and to fp8."""
    if capability < _FP8_CONVERSIONS:
        raise InvalidRequest(
            f"flag kv_cache_dtype=fp8: {device} does not convert fp8; devices of compute capability"
            f" {_dotted(_FP8_CONVERSIONS)} and later do; leave it at kv_cache_dtype=auto",
            field="kv_cache_dtype",
        )


def refuse_fp8_products(device: str, capability: tuple[int, int]) -> None:
    """Raise ``InvalidRequest`` if the device named ``device`` has no row-wise fp8 matrix products."""
    if capability < ROW_WISE_PRODUCTS:
        raise InvalidRequest(
            f"flag quantization=fp8: {device} (compute capability {_dotted(capability)}) has no row-wise fp8 products;"
            f" {_dotted(ROW_WISE_PRODUCTS)} and later have; use quantization=none",
            field="quantization",
        )


def refuse_too_large_weights(model: str, needed: int, memory: int) -> None:
    """Raise ``InvalidRequest`` if the weights and the rotary table exceed the device's memory. Sizes are in bytes."""
    if needed > memory:
        raise InvalidRequest(
            f"flag model={model}: config.json describes weights and a table of positions of {needed / 2**30:,.1f} GiB,"
            f" and this device has {memory / 2**30:,.1f} GiB; choose a smaller model, a lower max_context_tokens, or"
            " more ranks",
            field="model",
        )


def refuse_unquantizable_sizes(config: ModelConfig, tp_size: int) -> None:
    """Raise ``InvalidRequest`` if a matrix of ``config``, the share of one rank, has a size that fp8 does not support.

    ``tp_size`` appears in the message only.
    """
    sizes = {
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads * head_dim": config.heads * config.head_dim,
        "num_key_value_heads * head_dim": config.kv_heads * config.head_dim,
    }
    if config.has_dense_layers:
        sizes["intermediate_size"] = config.intermediate_size
    for experts in config.experts:
        sizes |= {"width of an expert": experts.width, "width of the shared expert": experts.shared_width}
    _refuse_other_multiples("fp8", sizes, FP8_MULTIPLE, tp_size)


def refuse_integer_weights(config: ModelConfig, quantization: str, tp_size: int) -> None:
    """Raise ``InvalidRequest`` if a matrix of ``config`` does not support ``quantization``, int8 or int4.

    ``config`` describes the share of each of ``tp_size`` ranks.
    """
    sizes = {"hidden_size": config.hidden_size, "num_attention_heads * head_dim": config.heads * config.head_dim}
    if config.has_dense_layers:
        sizes["intermediate_size"] = config.intermediate_size
    for experts in config.experts:
        sizes |= {"width of an expert": experts.width, "width of the shared expert": experts.shared_width}
    _refuse_other_multiples(quantization, sizes, INTEGER_GROUP, tp_size)


def _refuse_other_multiples(quantization: str, sizes: Mapping[str, int], multiple: int, tp_size: int) -> None:
    """Raise ``InvalidRequest`` if one of ``sizes``, by name, is not a multiple of ``multiple``."""
    for name, size in sizes.items():
        if size % multiple:
            raise InvalidRequest(
                f"flag quantization={quantization}: the model's {name} is {size}"
                + (f" on each of tp_size={tp_size} ranks" if tp_size > 1 else "")
                + f", which is not a multiple of {multiple}; use quantization=none"
                + (" or a lower tp_size" if tp_size > 1 else ""),
                field="quantization",
            )


def refuse_unrecordable_experts(config: ModelConfig) -> None:
    """Raise ``InvalidRequest`` if the experts of the tokens of the model ``config`` cannot be kept."""
    reason = None
    if config.foreign:
        reason = f"the layers of {config.foreign} are those of transformers, whose routers cannot be read"
    elif not config.experts:
        reason = "the model has no experts, only dense layers"
    elif config.window_tokens:
        reason = "every layer has a sliding window, and pages outside of it are not kept"
    if reason is not None:
        raise InvalidRequest(
            f"flag return_routed_experts=T: {reason}; leave the flag out", field="return_routed_experts"
        )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
