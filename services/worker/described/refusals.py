"""Flags and models that a kind of device has no use for, or no kernels. No torch here: it can be asked before a
start."""

from pathlib import Path

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import cuda_only
from services.worker.described.config import ModelConfig

# Triton has no conversions from and to float8_e4m3fn for devices before.
_CONVERTS = (8, 9)
_ROW_WISE = (9, 0)  # products of rows with a scale each
# The product of two matrices in fp8 takes whole blocks of so many elements.
_BLOCK = 16
_NUMBA_SETTINGS = Path(".numba_config.yaml")


def refuse_what_a_cpu_has_not(config: WorkerConfig) -> None:
    """Raise ``InvalidRequest`` if a flag is set that only CUDA devices support."""
    for name, value, fix in cuda_only(config):
        raise InvalidRequest(f"flag {name}={value}: only on cuda, and this worker runs on cpu; {fix}", field=name)


def refuse_numba_settings() -> None:
    """Raise ``InvalidRequest`` if the current directory has a settings file of numba's.

    Numba reads it unasked. It names the directory of numba's compiled code, which is pickled: a model's directory that
    has both could run code in the worker.
    """
    if _NUMBA_SETTINGS.exists():
        raise InvalidRequest(
            f"{_NUMBA_SETTINGS.absolute()}: numba would take its settings from this file in the current directory,"
            " and the name of a directory with code to run; start in another directory, or remove the file"
        )


def refuse_sizes_of_cuda(page_size: int, head_dim: int) -> None:
    """Its kernels index with masks and shifts. Raises ``InvalidRequest``."""
    if page_size & (page_size - 1):
        raise InvalidRequest(
            f"flag page_size={page_size}: on cuda it must be a power of two; use 16, for example", field="page_size"
        )
    if head_dim < 16 or head_dim & (head_dim - 1):
        raise InvalidRequest(
            f"config.json: head_dim={head_dim} is not supported on cuda, 16, 32, 64, 128 and 256 are; choose another"
            " model, or device=cpu",
            field="model",
        )


def refuse_fp8_cache(device: str, capability: tuple[int, int]) -> None:
    """``device``: its name. Raises ``InvalidRequest``."""
    if capability < _CONVERTS:
        raise InvalidRequest(
            f"flag kv_cache_dtype=fp8: {device} does not convert fp8, devices of compute capability"
            f" {_dotted(_CONVERTS)} and later do; leave it at kv_cache_dtype=auto",
            field="kv_cache_dtype",
        )


def refuse_fp8_products(device: str, capability: tuple[int, int]) -> None:
    """``device``: its name. Raises ``InvalidRequest``."""
    if capability < _ROW_WISE:
        raise InvalidRequest(
            f"flag quantization=fp8: {device} (compute capability {_dotted(capability)}) has no row-wise fp8 products,"
            f" {_dotted(_ROW_WISE)} and later have; use quantization=none",
            field="quantization",
        )


def refuse_too_large_weights(model: str, needed: int, memory: int) -> None:
    """Raise ``InvalidRequest`` if the weights and the table of positions, ``needed`` bytes, exceed the ``memory`` of
    the device, in bytes."""
    if needed > memory:
        raise InvalidRequest(
            f"flag model={model}: config.json describes weights and a table of positions of {needed / 2**30:,.1f} GiB,"
            f" and this device has {memory / 2**30:,.1f} GiB; choose a smaller model, a lower max_context_tokens, or"
            " more ranks",
            field="model",
        )


def refuse_unquantizable_sizes(config: ModelConfig, tp_size: int) -> None:
    """``config``: of what each of ``tp_size`` ranks has. Raises ``InvalidRequest``."""
    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "num_attention_heads * head_dim": config.heads * config.head_dim,
        "num_key_value_heads * head_dim": config.kv_heads * config.head_dim,
    }
    for name, size in sizes.items():
        if size % _BLOCK:
            raise InvalidRequest(
                f"flag quantization=fp8: the model's {name} is {size}"
                + (f" on each of tp_size={tp_size} ranks" if tp_size > 1 else "")
                + f", which is not a multiple of {_BLOCK}; use quantization=none"
                + (" or a lower tp_size" if tp_size > 1 else ""),
                field="quantization",
            )


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"
