"""Rotary position embedding: angles for every position once, one multiply-add a layer."""

import math

import torch

from services.worker.layers.rope import RopeSettings


class Rotary:
    """Cosines and sines of every position. Read-only after it is made, so any thread may use it.

    ``cos`` and ``sin`` are ``[max_context_tokens, head_dim]`` float32; the first half of each ``sin`` row is negative,
    so that rotating is ``x * cos + swap_halves(x) * sin``.
    """

    def __init__(
        self, settings: RopeSettings, head_dim: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(max_tokens, dtype=torch.float32)
        angles = torch.outer(positions, _frequencies(settings, head_dim))
        cos, sin = angles.cos(), angles.sin()
        self._dtype = dtype
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines for ``positions [tokens]`` int64, each ``[tokens, 1, head_dim]`` of ``dtype``: once a
        step."""
        # Rounded to the model's dtype, as the reference implementation does.
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return cos.to(self._dtype), sin.to(self._dtype)


def _frequencies(settings: RopeSettings, head_dim: int) -> torch.Tensor:
    """Radians per position, ``[head_dim / 2]`` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (settings.theta**exponents)
    if settings.kind == "linear":
        return frequencies / settings.factor
    if settings.kind == "llama3":
        # Waves longer than the trained context are stretched by the factor, short ones kept, those between blended.
        turns = settings.original_max_position_embeddings * frequencies / (2 * math.pi)
        low, high = settings.low_freq_factor, settings.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return kept * frequencies + (1 - kept) * frequencies / settings.factor
    return frequencies
