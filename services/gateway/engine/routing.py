"""Choice of a replica for a prompt: one with the prefix in its cache, unless it has far more work than another."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

BLOCK_TOKENS = 64
MAX_BLOCKS = 131_072  # a power of two
# Loads that differ by less than this fraction count as equal, since prompts of a burst differ in length.
_EQUAL_WITHIN = 1 / 32
# A replica with the prefix may have at most twice the work of the least loaded one, plus this number of tokens.
SLACK_TOKENS = 16_384


class Target(Protocol):
    """The properties of a replica that routing uses."""

    address: str

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of work ahead of a new request."""


T = TypeVar("T", bound=Target)


class PrefixRouter:
    """Routes prompts by their prefix. Records which replica last received each prefix.

    A prefix is a chain of hashes of token blocks. The record is only a hint: a replica that has evicted a prefix
    computes it again. The table has a fixed size, one entry of 8 bytes per hash, and a later block overwrites an
    earlier one.

    Replicas with equal load take turns. Gateways do not see each other's requests until schedulers report them, which
    takes longer than a burst. ``turn`` is the index of the first replica to use, and should differ between gateways.
    """

    def __init__(self, turn: int | None = None) -> None:
        self._turn = random.randrange(2**16) if turn is None else turn
        self._seen = np.full(MAX_BLOCKS, -1, np.int64)  # hash of a prefix, XOR the hash of the replica's address

    @property
    def nbytes(self) -> int:
        """Size of the record in bytes."""
        return self._seen.nbytes

    def choose(self, targets: Sequence[T], prompt_ids: np.ndarray, cache_salt: str = "") -> T:
        """Choose one of ``targets`` (not empty) for ``prompt_ids``, and record the choice."""
        if len(targets) == 1:
            return targets[0]
        blocks = _block_hashes(prompt_ids, cache_salt)
        least = self._least(targets)
        chosen = self._warmest(targets, blocks) or least
        if chosen.outstanding_tokens > 2 * least.outstanding_tokens + SLACK_TOKENS:
            chosen = least
        self._turn = targets.index(chosen) + 1
        self._seen[blocks % MAX_BLOCKS] = blocks ^ hash(chosen.address)
        return chosen

    def _least(self, targets: Sequence[T]) -> T:
        """Return the next target, in turn, among those with the least work."""
        bound = (1 + _EQUAL_WITHIN) * min(target.outstanding_tokens for target in targets)
        turns = ((self._turn + i) % len(targets) for i in range(len(targets)))
        return next(targets[turn] for turn in turns if targets[turn].outstanding_tokens <= bound)

    def _warmest(self, targets: Sequence[T], blocks: np.ndarray) -> T | None:
        """Return the target that received the longest prefix, or None."""
        seen, warmest, most = self._seen[blocks % MAX_BLOCKS], None, 0
        for target in targets:
            known = np.flatnonzero(seen == blocks ^ hash(target.address))
            if len(known) and known[-1] >= most:
                warmest, most = target, known[-1] + 1
        return warmest


def _block_hashes(prompt_ids: np.ndarray, cache_salt: str) -> np.ndarray:
    """Return the hash (int64) of the prefix up to the end of each whole block."""
    hashes, chained = [], hash(cache_salt)
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chained = hash((chained, prompt_ids[start : start + BLOCK_TOKENS].tobytes()))
        hashes.append(chained)
    return np.array(hashes, np.int64)
