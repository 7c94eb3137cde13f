"""The order of the elements of a head in the model, which differs from the checkpoint's for some models.

All kernels turn element i of a head with element i + head_dim / 2, and CUDA kernels need a ``head_dim`` that is a power
of two. Elements of q and k may be reordered, because scores are sums over all elements. Elements that do not turn have
the angle 0.
"""

from dataclasses import replace

from services.worker.described.config import ModelConfig

# Smallest head of the kernels for CUDA.
_LEAST_CUDA_HEAD_DIM = 16
_PADDING = -1


def laid_out(model: ModelConfig, device: str) -> ModelConfig:
    """Return ``model`` as it is computed on a ``device``, ``cpu`` or ``cuda``.

    On CUDA, the size of a head is a power of two and at least 16. The added elements are zeros.
    """
    if device == "cpu":
        return model
    size = max(_LEAST_CUDA_HEAD_DIM, 1 << (model.stored_head_dim - 1).bit_length())
    return replace(model, head_dim=size, head_padding=size - model.stored_head_dim)


def value_order(model: ModelConfig) -> list[int]:
    """Return the checkpoint's element of each element of a value head, -1 for padding, ``[head_dim]``."""
    return [*range(model.stored_head_dim), *[_PADDING] * model.head_padding]


def query_order(model: ModelConfig) -> list[int]:
    """Return the checkpoint's element of each element of a query or key head, -1 for padding, ``[head_dim]``."""
    pairs, half = model.rotated_dim // 2, model.head_dim // 2
    others = [*range(model.rotated_dim, model.stored_head_dim), *[_PADDING] * model.head_padding]
    first = half - pairs  # elements of the first half that do not turn
    return [*range(pairs), *others[:first], *range(pairs, 2 * pairs), *others[first:]]
