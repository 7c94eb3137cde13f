"""The experts of a choice's tokens, as HTTP clients get them."""

import base64
import io

import numpy as np

from services.common.plan.routed_experts import RoutedExpertsLayout


def encode_experts(data: bytes | bytearray, layout: RoutedExpertsLayout) -> str:
    """Return a NumPy file (``.npy``) in Base64. Its array is ``[tokens, layers, experts per token]`` uint8 or uint16.

    ``data``: the experts of consecutive tokens, as in the contract.
    """
    shape = len(data) // layout.token_bytes, layout.layers, layout.experts_per_token
    file = io.BytesIO()
    np.save(file, np.frombuffer(data, f"<u{layout.bytes_per_expert}").reshape(shape), allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
