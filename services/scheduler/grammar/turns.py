"""Whose grammar is looked at next: clients take turns, so that a thousand of one do not hold up another's first."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class Turns(Generic[Item]):
    """Items that wait, each for one client or several. Owned by the asyncio loop."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, dict[Item, None]] = OrderedDict()  # by client; none is empty

    def put(self, client: Hashable, item: Item) -> None:
        """Behind what ``client`` waits for already. Of several who wait for the same, it is whose turn comes first."""
        self._queues.setdefault(client, {})[item] = None

    def waiting(self, client: Hashable) -> int:
        """Items of ``client``."""
        return len(self._queues.get(client, ()))

    def take(self) -> Item | None:
        """The first one of the client whose turn it is; None where nothing waits."""
        if not self._queues:
            return None
        client, queue = next(iter(self._queues.items()))
        item = next(iter(queue))
        self.drop(item)
        if client in self._queues:
            self._queues.move_to_end(client)
        return item

    def drop(self, item: Item) -> None:
        """Nobody waits for it any longer."""
        for client in [client for client, queue in self._queues.items() if item in queue]:
            del self._queues[client][item]
            if not self._queues[client]:
                del self._queues[client]
