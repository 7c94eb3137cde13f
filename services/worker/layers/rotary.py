"""Rotary position embedding with tables of cosines and sines for all positions."""

import math
from typing import Protocol

import torch

from services.worker.described.rope import RopeSettings, has_long_factors


class RotationTables(Protocol):
    """Cosines and sines of all positions, ``[max_tokens, elements]``; see ``Rotary``."""

    @property
    def cos(self) -> torch.Tensor:
        """Cosines."""

    @property
    def sin(self) -> torch.Tensor:
        """Sines, the first half of each row negated."""


class Rotary:
    """Cosines and sines of all positions. Read-only after construction, so any thread may use them.

    ``cos`` and ``sin`` are ``[max_tokens, head_dim]`` float32. The first half of each ``sin`` row is negated, so that a
    rotation is ``x * cos + swap_halves(x) * sin``.

    Sequences that share a page share its rotated keys, so angles may depend on the position only. In transformers, two
    kinds of scaling depend on the length of the sequence. Here they work as follows:

    * ``dynamic`` rotates position p as in a sequence of p + 1 tokens. transformers does the same if it generates token
      by token, but uses one base for all tokens of a prompt that is longer than the original context.
    * ``longrope`` uses the long factors for all positions if ``max_tokens`` exceeds the original context, and the short
      factors otherwise.
    """

    def __init__(
        self,
        settings: RopeSettings | None,
        rotated: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        head_dim: int | None = None,
    ) -> None:
        """Compute the tables for contexts of up to ``max_tokens``. ``dtype`` is that of the values ``at`` returns.

        The first and the second ``rotated / 2`` elements turn, counted from the beginning and from the middle of a head
        of ``head_dim`` elements, by default ``rotated``. Without ``settings``, no element turns.
        """
        half = (head_dim or rotated) // 2
        cos, sin = torch.ones(max_tokens, half), torch.zeros(max_tokens, half)
        if settings is not None:
            positions = torch.arange(max_tokens, dtype=torch.float32)
            angles = positions[:, None] * _frequencies(settings, rotated, max_tokens)
            cos[:, : rotated // 2] = angles.cos() * settings.attention_factor
            sin[:, : rotated // 2] = angles.sin() * settings.attention_factor
        self._dtype = dtype
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for ``positions [tokens]`` int64, each ``[tokens, 1, head_dim]`` of ``dtype``."""
        # transformers also rounds to the model's dtype.
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return cos.to(self._dtype), sin.to(self._dtype)


def _frequencies(settings: RopeSettings, rotated: int, max_tokens: int) -> torch.Tensor:
    """Return radians per position, ``[rotated / 2]`` float32.

    Operations are in the order of transformers: a difference in the last bit grows with the position. For ``dynamic``,
    the frequencies depend on the position and are ``[max_tokens, rotated / 2]``.
    """
    exponents = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    wavelengths = settings.theta**exponents
    if settings.kind == "linear":
        return 1.0 / wavelengths / settings.factor
    if settings.kind == "dynamic":
        return _dynamic(settings, rotated, max_tokens, exponents)
    if settings.kind == "longrope":
        long = has_long_factors(settings, max_tokens)
        return 1.0 / (torch.tensor(settings.long_factor if long else settings.short_factor) * wavelengths)
    if settings.kind == "llama3":
        return _llama3(settings, 1.0 / wavelengths)
    if settings.kind == "yarn":
        unscaled = _unscaled_share(settings, rotated)
        return 1.0 / (settings.factor * wavelengths) * (1 - unscaled) + 1.0 / wavelengths * unscaled
    return 1.0 / wavelengths


def _dynamic(settings: RopeSettings, rotated: int, max_tokens: int, exponents: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of NTK-aware scaling, whose base grows with the position."""
    original, factor = settings.original_max_position_embeddings, settings.factor
    lengths = torch.arange(1, max_tokens + 1).clamp(min=original)
    growth = ((factor * lengths / original) - (factor - 1)) ** (rotated / (rotated - 2))
    bases = torch.where(lengths > original, settings.theta * growth, settings.theta)
    return 1.0 / bases[:, None] ** exponents


def _llama3(settings: RopeSettings, frequencies: torch.Tensor) -> torch.Tensor:
    """Return ``frequencies`` scaled as in Llama 3.

    Low frequencies are divided by the factor, high ones are kept, and those in between are interpolated.
    """
    original, low, high = settings.original_max_position_embeddings, settings.low_freq_factor, settings.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    unscaled = (original / wavelengths - low) / (high - low)
    between = (1 - unscaled) * frequencies / settings.factor + unscaled * frequencies
    kept = torch.where(wavelengths < original / high, frequencies, between)
    return torch.where(wavelengths > original / low, frequencies / settings.factor, kept)


def _unscaled_share(settings: RopeSettings, rotated: int) -> torch.Tensor:
    """Return the share of each frequency that YaRN (Peng et al. 2023) does not scale, ``[rotated / 2]``.

    It is 1 for frequencies with at least ``beta_fast`` turns in the original context, and 0 for frequencies with at
    most ``beta_slow`` turns.
    """

    def dimension(turns: float) -> float:
        """Return the dimension whose frequency has ``turns`` turns in the original context."""
        wavelength = settings.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotated * math.log(wavelength) / (2 * math.log(settings.theta))

    first, last = dimension(settings.beta_fast), dimension(settings.beta_slow)
    if settings.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    width = last - first if last != first else 0.001
    return 1 - ((torch.arange(rotated // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
