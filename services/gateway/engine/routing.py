"""Which replica gets a prompt: the one that has its prefix in cache, unless it has far more to do than another."""

import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

BLOCK_TOKENS = 64
MAX_BLOCKS = 131_072  # a power of two
# Work ahead that differs by less than this part of it is the same: prompts of one burst are never of one length.
_ALIKE = 1 / 32
# A warm prefix is worth a wait of the least loaded replica's work again and this many tokens, not more.
SLACK_TOKENS = 16_384


class Target(Protocol):
    """What routing needs to know about a replica."""

    address: str

    @property
    def outstanding_tokens(self) -> int:
        """Work ahead of a new request."""


T = TypeVar("T", bound=Target)


class PrefixRouter:
    """Remembers which replica saw which prefix last: hashes of blocks of tokens, each chained to the one before.

    A hint and no more: what a replica has evicted is merely computed again. A block has one place in a table of fixed
    size, by its hash, which the last one that came there keeps: 8 bytes each, and as much from the begin as ever.

    Replicas with as much to do take turns. Several gateways know little of each other's requests, and a burst is over
    before their schedulers tell: ``turn`` says with which one to begin, other than the next gateway does.
    """

    def __init__(self, turn: int | None = None) -> None:
        self._turn = random.randrange(2**16) if turn is None else turn
        self._seen = np.full(MAX_BLOCKS, -1, np.int64)  # hash of a prefix, mixed with that of its replica's address

    def choose(self, targets: Sequence[T], prompt_ids: np.ndarray, cache_salt: str = "") -> T:
        """One of ``targets`` (at least one) for ``prompt_ids``, and remember it."""
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
        """The next one of those that have least to do."""
        bound = (1 + _ALIKE) * min(target.outstanding_tokens for target in targets)
        turns = ((self._turn + i) % len(targets) for i in range(len(targets)))
        return next(targets[turn] for turn in turns if targets[turn].outstanding_tokens <= bound)

    def _warmest(self, targets: Sequence[T], blocks: np.ndarray) -> T | None:
        """The one that saw most of the blocks."""
        seen, warmest, most = self._seen[blocks % MAX_BLOCKS], None, 0
        for target in targets:
            known = np.flatnonzero(seen == blocks ^ hash(target.address))
            if len(known) and known[-1] >= most:
                warmest, most = target, known[-1] + 1
        return warmest


def _block_hashes(prompt_ids: np.ndarray, cache_salt: str) -> np.ndarray:
    """Of each whole block and all before it: int64."""
    hashes, chained = [], hash(cache_salt)
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chained = hash((chained, prompt_ids[start : start + BLOCK_TOKENS].tobytes()))
        hashes.append(chained)
    return np.array(hashes, np.int64)
