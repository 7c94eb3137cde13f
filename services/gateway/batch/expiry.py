"""Records that are deleted when they have expired."""

from typing import Protocol


class Expiring(Protocol):
    """Records of one kind."""

    async def forget_expired(self) -> bool:
        """Delete some of those that have expired. Returns whether there may be more."""


class ExpiringTogether:
    """Records of several kinds."""

    def __init__(self, *kinds: Expiring) -> None:
        self._kinds = kinds

    async def forget_expired(self) -> bool:
        """Delete some of those that have expired, of each kind. Returns whether there may be more."""
        return any([await kind.forget_expired() for kind in self._kinds])
