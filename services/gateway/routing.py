"""Which replica gets a prompt: the one that has its prefix in cache, unless it has far more to do than another."""

import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np

BLOCK_TOKENS = 64
MAX_BLOCKS = 65_536
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

    A hint and no more: what a replica has evicted is merely computed again. Bounded; the oldest blocks are forgotten.
    """

    def __init__(self) -> None:
        self._owners: OrderedDict[int, str] = OrderedDict()  # chained hash of a prefix -> address

    def choose(self, targets: Sequence[T], prompt_ids: np.ndarray, cache_salt: str = "") -> T:
        """One of ``targets`` (at least one) for ``prompt_ids``, and remember it."""
        if len(targets) == 1:
            return targets[0]
        blocks = _block_hashes(prompt_ids, cache_salt)
        # Several gateways know little of each other's requests: among equals they must not all begin with the same one.
        least = min(targets, key=lambda target: (target.outstanding_tokens, random.random()))
        chosen = self._warmest(targets, blocks) or least
        if chosen.outstanding_tokens > 2 * least.outstanding_tokens + SLACK_TOKENS:
            chosen = least
        for block in blocks:
            self._owners[block] = chosen.address
            self._owners.move_to_end(block)
        while len(self._owners) > MAX_BLOCKS:
            self._owners.popitem(last=False)
        return chosen

    def _warmest(self, targets: Sequence[T], blocks: list[int]) -> T | None:
        by_address = {target.address: target for target in targets}
        for block in reversed(blocks):
            owner = by_address.get(self._owners.get(block, ""))
            if owner is not None:
                return owner
        return None


def _block_hashes(prompt_ids: np.ndarray, cache_salt: str) -> list[int]:
    hashes, chained = [], hash(cache_salt)
    for start in range(0, len(prompt_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chained = hash((chained, prompt_ids[start : start + BLOCK_TOKENS].tobytes()))
        hashes.append(chained)
    return hashes
