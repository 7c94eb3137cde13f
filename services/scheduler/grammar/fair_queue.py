"""A queue in which clients take turns, so that a thousand items of one client do not delay the first of another."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class FairQueue(Generic[Item]):
    """Queue of items, each waiting for one or more clients. Used on the event loop."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, dict[Item, None]] = OrderedDict()  # by client; never empty

    def put(self, client: Hashable, item: Item) -> None:
        """Append ``item`` to the client's queue. It may be in the queues of several clients."""
        self._queues.setdefault(client, {})[item] = None

    def waiting(self, client: Hashable) -> int:
        """Return the number of items of ``client``."""
        return len(self._queues.get(client, ()))

    def take(self) -> Item | None:
        """Remove and return the first item of the next client, or None if the queue is empty."""
        if not self._queues:
            return None
        client, queue = next(iter(self._queues.items()))
        item = next(iter(queue))
        self.drop(item)
        if client in self._queues:
            self._queues.move_to_end(client)
        return item

    def drop(self, item: Item) -> None:
        """Remove ``item`` for all clients."""
        for client in [client for client, queue in self._queues.items() if item in queue]:
            del self._queues[client][item]
            if not self._queues[client]:
                del self._queues[client]
