"""The queue of samples that are accepted and not running."""

from collections import OrderedDict
from collections.abc import Iterator

from services.scheduler.core.request import Priority, Sample


class WaitingQueue:
    """Priority classes, first come first served within each. Owned by the core."""

    def __init__(self) -> None:
        self._classes: dict[Priority, OrderedDict[Sample, None]] = {priority: OrderedDict() for priority in Priority}
        self.tokens = 0  # outstanding tokens of all samples here

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> Iterator[Sample]:
        """In the order of service."""
        for samples in self._classes.values():
            yield from samples

    def push(self, sample: Sample) -> None:
        """At the end of its class."""
        self._classes[sample.request.priority][sample] = None
        self.tokens += sample.outstanding
        sample.request.waiting += 1

    def push_front(self, sample: Sample) -> None:
        """At the head of its class: a sample that was running before."""
        self.push(sample)
        self._classes[sample.request.priority].move_to_end(sample, last=False)

    def remove(self, sample: Sample) -> None:
        del self._classes[sample.request.priority][sample]
        self.tokens -= sample.outstanding
        sample.request.waiting -= 1
