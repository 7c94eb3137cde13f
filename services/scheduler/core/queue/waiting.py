"""The queue of accepted samples that do not run: priority classes with ageing, and fairness between keys."""

from collections import Counter, OrderedDict
from collections.abc import Iterator, Set
from heapq import heapify, heappop, heapreplace, merge
from itertools import islice, takewhile

from services.scheduler.core.request import Priority, Sample

_MOST_REMEMBERED = 4096  # start tags of keys without waiting samples


class WaitingQueue:
    """Orders waiting samples by class, and within a class by fairness key. Owned by the core.

    The keys of a class share the service by start-time fair queueing (Goyal, Vin, Cheng 1996), counted in tokens. Each
    key is first come, first served. ``charge`` counts what was computed for a key. A sample waiting behind others of
    its key has a start tag later by what these are expected to cost, so one plan admits samples of all keys.

    Higher classes are served first. For each class that it is lower, a sample competes with the highest waiting class
    as if it had been accepted ``ageing_ns`` later. Samples that so come before the oldest of that class are overdue.
    Overdue samples are served before all others, the oldest first. With ``ageing_ns`` 0 no sample is overdue.

    Parked samples belong to no class. They are served only if no other sample can be served, in the order in which they
    were parked.

    The order changes only when samples enter or leave and when service is charged. The cost of a call grows with the
    samples that it concerns and with the number of waiting keys.
    """

    def __init__(self, ageing_ns: int) -> None:
        self.tokens = 0  # sum of the limits of all samples that are not parked
        self.admitted_before: int | None = None  # if set, only samples with an earlier arrival are candidates
        self._length = 0
        self._ageing_ns = ageing_ns
        self._classes = {priority: _FairQueue() for priority in Priority}
        self._parked: OrderedDict[Sample, None] = OrderedDict()

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sample]:
        """Yield every sample once, by class and key. This is not the order of service."""
        for each in self._classes.values():
            for flow in each.flows.values():
                yield from flow.samples
        yield from self._parked

    def __contains__(self, sample: Sample) -> bool:
        if sample.request.parked:
            return sample in self._parked
        flow = self._classes[sample.request.priority].flows.get(sample.request.fairness_key)
        return flow is not None and sample in flow.samples

    def push(self, sample: Sample) -> None:
        """Add a sample as the last of its key in its class, or of the parked samples."""
        if sample.request.parked:
            self._parked[sample] = None
        else:
            self._classes[sample.request.priority].flow(sample.request.fairness_key).push(sample)
        self._count(sample, 1)

    def push_front(self, sample: Sample) -> None:
        """Add a sample that has run, as the first of its key in its class, or of the parked samples."""
        if sample.request.parked:
            self._parked[sample] = None
            self._parked.move_to_end(sample, last=False)
        else:
            self._classes[sample.request.priority].flow(sample.request.fairness_key).push_front(sample)
        self._count(sample, 1)

    def remove(self, sample: Sample) -> None:
        """Remove a sample. Raises ``KeyError`` if it is not in the queue."""
        if sample.request.parked:
            del self._parked[sample]
        else:
            self._classes[sample.request.priority].remove(sample)
        self._count(sample, -1)

    def charge(self, priority: Priority, key: str, tokens: int) -> None:
        """Count ``tokens`` that were computed for a key in a class."""
        self._classes[priority].charge(key, tokens)

    def charge_only(self, key: str, tokens: int) -> None:
        """Count ``tokens`` computed for a key in every class, as no other key runs.

        Classes differ only if several keys run.
        """
        for each in self._classes.values():
            each.charge(key, tokens)

    @property
    def parked(self) -> int:
        """The number of parked samples."""
        return len(self._parked)

    @property
    def highest(self) -> Priority | None:
        """The highest class in which a sample that is not parked waits, or None."""
        return next((priority for priority, each in self._classes.items() if each.flows), None)

    def flows(self) -> Iterator[tuple[Priority, str, int]]:
        """Yield class, key and known tokens of the samples that are not parked, for every key of every class."""
        for priority, each in self._classes.items():
            for key, flow in each.flows.items():
                yield priority, key, flow.given

    def has_other_key(self, key: str | None) -> bool:
        """Return whether samples of a key other than ``key`` wait. For None, whether samples of two keys wait.

        Parked samples do not count.
        """
        for each in self._classes.values():
            for found in each.flows:
                if key is None:
                    key = found
                elif found != key:
                    return True
        return False

    def overdue_before(self, priority: Priority) -> int | None:
        """Return the time in nanoseconds before which an overdue sample of a class was accepted.

        None if no sample can be overdue: without ageing, and if no higher class waits.
        """
        highest = self.highest
        if not self._ageing_ns or highest is None or highest >= priority:
            return None
        oldest = min(flow.first.accepted_ns for flow in self._classes[highest].flows.values())
        return oldest - (priority - highest) * self._ageing_ns

    def candidates(self, most: int, most_overdue_low: int | None = None) -> list[Sample]:
        """Return the next ``most`` samples in the order of service, as if each was served now. Changes nothing.

        ``most_overdue_low`` is how many samples of class ``low`` may precede higher classes. None: any number.
        """
        order = self._overdue(most, {Priority.LOW: most_overdue_low})
        overdue = set(order)
        for priority, each in self._classes.items():
            served = {sample for sample in overdue if sample.request.priority == priority}
            order += islice(each.in_order(served, self.admitted_before), most - len(order))
        return order or list(islice(self._parked_in_order(), most))

    def _parked_in_order(self) -> Iterator[Sample]:
        before = self.admitted_before
        return (sample for sample in self._parked if before is None or sample.arrival < before)

    def _overdue(self, most: int, limits: dict[Priority, int | None]) -> list[Sample]:
        found = []
        for priority, each in self._classes.items():
            if (before_ns := self.overdue_before(priority)) is not None:
                flows = (flow.accepted_before(before_ns, self.admitted_before) for flow in each.flows.values())
                found.append(islice(merge(*flows, key=self._rank), limits.get(priority)))
        return list(islice(merge(*found, key=self._rank), most))

    def _rank(self, sample: Sample) -> tuple[int, int]:
        """Return the sort key of overdue samples of all classes. ``arrival`` decides between equal times."""
        return sample.accepted_ns + sample.request.priority * self._ageing_ns, sample.arrival

    def _count(self, sample: Sample, change: int) -> None:
        self._length += change
        self.tokens += 0 if sample.request.parked else change * sample.request.limit
        sample.request.waiting += change


class _Flow:
    """The waiting samples of one fairness key in one class, in the order of service."""

    __slots__ = ("given", "joined", "samples", "start")

    def __init__(self, start: int, joined: int) -> None:
        self.start = start  # tag of the first sample, in tokens of service
        self.joined = joined  # number of keys that started to wait before
        self.given = 0  # known tokens of all samples
        self.samples: OrderedDict[Sample, None] = OrderedDict()

    @property
    def first(self) -> Sample:
        return next(iter(self.samples))

    def arrived_before(self, arrival: int | None) -> Iterator[Sample]:
        """Yield the samples that arrived before number ``arrival``, or all if it is None.

        They come first: a sample that has run and waits again arrived before all samples that may not run.
        """
        return (
            iter(self.samples) if arrival is None else takewhile(lambda sample: sample.arrival < arrival, self.samples)
        )

    def accepted_before(self, time_ns: int, arrival: int | None) -> Iterator[Sample]:
        """Yield the samples of ``arrived_before`` up to the first that was accepted at ``time_ns`` or later."""
        return takewhile(lambda sample: sample.accepted_ns < time_ns, self.arrived_before(arrival))

    def push(self, sample: Sample) -> None:
        self.samples[sample] = None
        self.given += sample.known

    def push_front(self, sample: Sample) -> None:
        self.push(sample)
        self.samples.move_to_end(sample, last=False)


class _FairQueue:
    """Start-time fair queueing over the keys of one class.

    A key has a start tag: the service that it got, in tokens. The key with the lowest tag is served; of equal tags, the
    key that started to wait last. The virtual time is the lowest tag of the keys that wait. A key that starts to wait
    gets the virtual time as its tag, or its former tag if that is higher: it has no credit for its idle time. Each such
    key gets a tag behind that of the key before, so that new keys cannot starve old ones. When no key waits, all tags
    are forgotten.
    """

    def __init__(self) -> None:
        self.flows: dict[str, _Flow] = {}  # keys with waiting samples
        self._tags: dict[str, int] = {}  # tags of keys that do not wait now
        self._newest = 0  # the last tag that was not a key's former one
        self._joined = 0

    def flow(self, key: str) -> _Flow:
        """Return the flow of a key. A key without a flow starts to wait."""
        flow = self.flows.get(key)
        if flow is None:
            start, virtual = self._tags.pop(key, -1), self._virtual_time()
            if start < virtual:
                start = self._newest = max(virtual, self._newest + 1)
            self._joined += 1
            flow = self.flows[key] = _Flow(start, self._joined)
        return flow

    def remove(self, sample: Sample) -> None:
        key = sample.request.fairness_key
        flow = self.flows[key]
        del flow.samples[sample]
        flow.given -= sample.known
        if flow.samples:
            return
        del self.flows[key]
        if self.flows:
            self._remember(key, flow.start)
        else:
            self._tags.clear()
            self._newest = 0

    def charge(self, key: str, tokens: int) -> None:
        """Count service for a key. While no key waits, nothing needs to be counted."""
        if (flow := self.flows.get(key)) is not None:
            flow.start += tokens
        elif self.flows:
            known = self._tags.get(key)
            self._remember(key, (self._virtual_time() if known is None else known) + tokens)

    def in_order(self, served: Set[Sample], arrival: int | None) -> Iterator[Sample]:
        """Yield the samples by start tag, without ``served``, which count as if they had left before.

        ``arrival`` is as for ``_Flow.arrived_before``.
        """
        if len(self.flows) == 1 and not served:
            (flow,) = self.flows.values()
            yield from flow.arrived_before(arrival)
            return
        before: Counter[str] = Counter()
        for sample in served:
            before[sample.request.fairness_key] += sample.request.cost
        heads = []
        for key, flow in self.flows.items():
            left = flow.arrived_before(arrival)
            if served:
                left = (sample for sample in left if sample not in served)
            heads.append((flow.start + before[key], -flow.joined, left))
        heapify(heads)
        while heads:
            start, joined, samples = heads[0]
            if (head := next(samples, None)) is None:
                heappop(heads)
            else:
                yield head
                heapreplace(heads, (start + head.request.cost, joined, samples))

    def _virtual_time(self) -> int:
        return min((flow.start for flow in self.flows.values()), default=0)

    def _remember(self, key: str, tag: int) -> None:
        self._tags[key] = tag
        if len(self._tags) > _MOST_REMEMBERED:
            for forgotten in sorted(self._tags, key=self._tags.__getitem__)[: _MOST_REMEMBERED // 2]:
                del self._tags[forgotten]
