"""Rotary position embedding: tables of angles for every position, and one multiply-add a layer."""

import math

import torch

from services.worker.described.rope import RopeSettings, has_long_factors


class Rotary:
    """Cosines and sines of every position, read-only after construction: any thread may use it.

    ``cos`` and ``sin`` are ``[max_tokens, head_dim]`` float32; the first half of each ``sin`` row is negative, so that
    rotating is ``x * cos + swap_halves(x) * sin``.

    A key stays in the cache as it was rotated, for any sequence that shares its page, so its angles may depend on
    nothing but its position. Two kinds of scaling depend on the sequence's length in transformers. Here:

    * ``dynamic`` rotates position p as in a sequence of p + 1 tokens. This is what transformers does when it generates
      token by token; a prompt longer than the original context has one base for all of its tokens there.
    * ``longrope`` has the long factors for every position if ``max_tokens`` exceeds the original context, and the short
      factors if it does not.
    """

    def __init__(
        self, settings: RopeSettings, head_dim: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``max_tokens``: the longest context that is served; ``dtype``: of the tables that ``at`` returns."""
        positions = torch.arange(max_tokens, dtype=torch.float32)
        angles = positions[:, None] * _frequencies(settings, head_dim, max_tokens)
        cos, sin = angles.cos() * settings.attention_factor, angles.sin() * settings.attention_factor
        self._dtype = dtype
        self.cos = torch.cat((cos, cos), dim=-1).to(device)
        self.sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for ``positions [tokens]`` int64, each ``[tokens, 1, head_dim]`` of ``dtype``."""
        # Rounded to the model's dtype, as the reference implementation does.
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        return cos.to(self._dtype), sin.to(self._dtype)


def _frequencies(settings: RopeSettings, head_dim: int, max_tokens: int) -> torch.Tensor:
    """Return radians per position, ``[head_dim / 2]`` float32, or ``[max_tokens, head_dim / 2]`` where each position
    has its own."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = settings.theta**exponents
    if settings.kind == "linear":
        return 1.0 / wavelengths / settings.factor
    if settings.kind == "dynamic":
        return _dynamic(settings, head_dim, max_tokens, exponents)
    if settings.kind == "longrope":
        long = has_long_factors(settings, max_tokens)
        return 1.0 / (torch.tensor(settings.long_factor if long else settings.short_factor) * wavelengths)
    if settings.kind == "llama3":
        return _llama3(settings, 1.0 / wavelengths)
    if settings.kind == "yarn":
        kept = _unscaled_share(settings, head_dim)
        return kept / wavelengths + (1 - kept) / (settings.factor * wavelengths)
    return 1.0 / wavelengths


def _dynamic(settings: RopeSettings, head_dim: int, max_tokens: int, exponents: torch.Tensor) -> torch.Tensor:
    """Return the frequencies of NTK-aware scaling by each position's own length: the base grows with it."""
    original, factor = settings.original_max_position_embeddings, settings.factor
    lengths = torch.arange(1, max_tokens + 1).clamp(min=original)
    growth = ((factor * lengths / original) - (factor - 1)) ** (head_dim / (head_dim - 2))
    bases = torch.where(lengths > original, settings.theta * growth, settings.theta)
    return 1.0 / bases[:, None] ** exponents


def _llama3(settings: RopeSettings, frequencies: torch.Tensor) -> torch.Tensor:
    """Return ``frequencies`` with waves longer than the original context stretched by the factor, short ones kept, and
    those between blended."""
    turns = settings.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = settings.low_freq_factor, settings.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / settings.factor


def _unscaled_share(settings: RopeSettings, head_dim: int) -> torch.Tensor:
    """Return how much of each frequency YaRN (Peng et al. 2023) leaves unscaled, ``[head_dim / 2]``: 1 where a wave
    turns ``beta_fast`` times or more within the original context, 0 where it turns ``beta_slow`` times or less."""

    def dimension(turns: float) -> float:
        """Return the dimension whose wave turns ``turns`` times."""
        waves = settings.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(settings.theta))

    first, last = dimension(settings.beta_fast), dimension(settings.beta_slow)
    if settings.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first if last != first else 0.001
    return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
