"""Activations of gated MLPs for Triton kernels. They compute what ``layers.activations`` does, in float32."""

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr):
    """Return ``activation(gate) * up`` for float32 tensors of one shape."""
    if ACTIVATION == "silu":
        result = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        result = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate)) * up
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(y)) is the sigmoid of 2 * y, and 2 * sqrt(2 / pi) is 1.5957691.
        doubled = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-doubled)) * up
    elif ACTIVATION == "relu":
        result = tl.maximum(gate, 0.0) * up
    elif ACTIVATION == "relu_squared":
        positive = tl.maximum(gate, 0.0)
        result = positive * positive * up
    else:
        tl.static_assert(ACTIVATION == "clamped_swiglu", "unknown activation")
        least = tl.minimum(gate, 7.0)
        bounded = tl.minimum(tl.maximum(up, -7.0), 7.0)
        result = (bounded + 1.0) * least / (1.0 + tl.exp(-1.702 * least))
    return result
