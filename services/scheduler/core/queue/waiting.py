"""The queue of samples that are accepted and not running: priority classes, ageing, fairness between keys."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, groupby, islice
from math import inf
from operator import attrgetter

from services.scheduler.core.queue.lazy_heap import LazyHeap
from services.scheduler.core.request import Priority, Sample

_MOST_REMEMBERED = 4096  # tags of keys that do not wait


class WaitingQueue:
    """Orders waiting samples by class, and within a class by fairness key. Owned by the core.

    A class ranks as its priority, less one for every ``ageing_ns`` that its oldest sample waited. Between equal ranks
    the higher class goes first. When a class goes before a higher one, which only age can bring about, its oldest
    sample is served. Otherwise its keys share the service by start-time fair queueing (Goyal, Vin, Cheng 1996), counted
    in tokens, and each key is first come, first served. With ``ageing_ns`` 0 priorities are strict.

    ``charge`` counts what was computed for a key. The order of one call of ``candidates`` also counts what the samples
    before are expected to take, so that one plan admits samples of all keys.

    The cost of a call grows with the samples that it concerns, and with the logarithm at most of all that wait.
    ``arrival`` must differ between samples: it settles equal ages.
    """

    def __init__(self, ageing_ns: int) -> None:
        self.tokens = 0  # outstanding tokens of all samples here
        self._length = 0
        self._ageing_ns = ageing_ns
        self._classes = [_PriorityClass(priority, ageing=ageing_ns > 0) for priority in Priority]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sample]:
        """Yield every sample once: class by class and key by key, not in the order of service."""
        for each in self._classes:
            for flow in each.flows.values():
                yield from flow.samples

    def __contains__(self, sample: Sample) -> bool:
        flow = self._classes[sample.request.priority].flows.get(sample.request.fairness_key)
        return flow is not None and sample in flow.samples

    def push(self, sample: Sample) -> None:
        """Add a sample as the last of its key in its class."""
        self._classes[sample.request.priority].push(sample)
        self._count(sample, 1)

    def push_front(self, sample: Sample) -> None:
        """Add a sample that was running as the first of its key in its class."""
        self._classes[sample.request.priority].push(sample, front=True)
        self._count(sample, 1)

    def remove(self, sample: Sample) -> None:
        """Remove a sample that does not start to run. Raises ``KeyError`` if it is not here."""
        self._classes[sample.request.priority].take(sample.request.fairness_key, (sample,))
        self._count(sample, -1)

    def serve(self, samples: Sequence[Sample]) -> None:
        """Remove samples that start to run. Raises ``KeyError`` if one is not here."""
        for (priority, key), run in groupby(samples, attrgetter("request.priority", "request.fairness_key")):
            served = list(run)
            self._classes[priority].take(key, served)
            for sample in served:
                self._count(sample, -1)

    def charge(self, priority: Priority, key: str, tokens: int) -> None:
        """Count ``tokens`` that were computed for a key in a class."""
        self._classes[priority].charge(key, tokens)

    def charge_only(self, key: str, tokens: int) -> None:
        """Count ``tokens`` that were computed while no other key had samples running. The classes are not told apart:
        that would matter only between keys."""
        for each in self._classes:
            if each.flows:
                each.charge(key, tokens)

    @property
    def highest(self) -> Priority | None:
        """The highest class in which a sample waits."""
        return next((each.priority for each in self._classes if each.flows), None)

    def flows(self) -> Iterator[tuple[Priority, str, int]]:
        """Yield class, key and known tokens of the waiting samples, for every key of every class."""
        for each in self._classes:
            for key, flow in each.flows.items():
                yield each.priority, key, flow.given

    def has_other_key(self, key: str | None) -> bool:
        """Return whether samples wait under a key other than ``key``. None: under two keys at least."""
        for each in self._classes:
            for found in each.flows:
                if key is None:
                    key = found
                elif found != key:
                    return True
        return False

    def candidates(self, most: int, now_ns: int, low_by_age: int | None = None) -> list[Sample]:
        """Return the next ``most`` samples in the order of service, as if each was served now. Changes nothing.

        ``low_by_age``: samples of class ``low`` that may go before higher classes; None: any number.
        """
        order: list[Sample] = []
        waiting = [each for each in self._classes if each.flows]
        if not self._ageing_ns or len(waiting) == 1:
            for each in waiting:
                order += islice(each.in_turn(), most - len(order))
            return order
        bounds = {Priority.LOW: low_by_age}
        contest = [_Contender(each, self._ageing_ns, now_ns, bounds.get(each.priority)) for each in waiting]
        while contest and len(order) < most:
            first = contest[0]
            rival = min(contest[1:], key=attrgetter("rank"), default=None)
            if rival is None or rival.rank >= first.priority:  # age takes `first` only further ahead
                order += islice(first.in_turn(), most - len(order))
                del contest[0]
                continue
            chosen = first if first.rank <= rival.rank else rival
            take = chosen.take_in_turn if chosen is first else chosen.take_oldest
            rank = chosen.rank
            while chosen.rank == rank and len(order) < most:  # until it changes, the same class is chosen
                order.append(take())
            if chosen.rank == inf:
                contest.remove(chosen)
        return order

    def _count(self, sample: Sample, change: int) -> None:
        self._length += change
        self.tokens += change * sample.outstanding
        sample.request.waiting += change


class _Flow:
    """The samples of one fairness key in one class, in order of service."""

    __slots__ = ("given", "joined", "key", "samples", "tag")

    def __init__(self, key: str, tag: int, joined: int) -> None:
        self.key = key
        self.tag = tag  # the key's virtual service, in tokens
        self.joined = joined  # settles equal tags
        self.given = 0  # known tokens of all samples
        self.samples: OrderedDict[Sample, None] = OrderedDict()


class _PriorityClass:
    """Start-time fair queueing over the keys of one class.

    The tag of a key is its virtual service, in tokens. The key with the least tag is served. The virtual time is the
    least tag of all keys that wait. A key that starts to wait begins at the virtual time, or at its own tag if that is
    more: it has no credit for its idle time. While no key waits, no key is denied service, and all begin anew alike.

    The first key that joins at a virtual time goes before the keys that have waited until then, since these were served
    meanwhile. Each further one joins a token later, so that new keys cannot starve old ones.
    """

    def __init__(self, priority: Priority, *, ageing: bool) -> None:
        self.priority = priority
        self.flows: dict[str, _Flow] = {}  # keys with waiting samples
        self.ages: LazyHeap[int, Sample] = LazyHeap()  # by (accepted_ns, arrival); empty without ageing
        self._tags: dict[str, int] = {}  # tags of keys that wait no more, until no key waits
        self._turns: LazyHeap[int, _Flow] = LazyHeap()  # by (tag, joined)
        self._ageing = ageing
        self._peak = 0  # the largest tag so far
        self._newcomers = (0, 0)  # the virtual time at which a key joined last, and how many joined at it
        self._joined = count()

    def push(self, sample: Sample, *, front: bool = False) -> None:
        key = sample.request.fairness_key
        flow = self.flows.get(key)
        if flow is None:
            flow = self.flows[key] = _Flow(key, self._start(key), next(self._joined))
            self._turns.put(flow.tag, flow.joined, flow)
        flow.samples[sample] = None
        flow.given += sample.known
        if front:
            flow.samples.move_to_end(sample, last=False)
        if self._ageing:
            self.ages.put(sample.accepted_ns, sample.arrival, sample)

    def _start(self, key: str) -> int:
        """Return the tag of a key that starts to wait."""
        # Not before the virtual time of the last that joined: it began a token earlier.
        virtual = max(self._newcomers[0], self._turns.first if self.flows else self._peak)
        known = self._tags.pop(key, None)
        if known is not None and known >= virtual:
            return known
        at, joined = self._newcomers
        joined = joined if at == virtual else 0
        self._newcomers = virtual, joined + 1
        return virtual - 1 + joined

    def take(self, key: str, samples: Sequence[Sample]) -> None:
        """Remove samples of one key."""
        flow = self.flows[key]
        for sample in samples:
            del flow.samples[sample]
            flow.given -= sample.known
            if self._ageing:
                self.ages.discard(sample)
        if not flow.samples:
            del self.flows[key]
            self._turns.discard(flow)
            self._remember(key, flow.tag)

    def charge(self, key: str, tokens: int) -> None:
        if not self.flows:
            return
        flow = self.flows.get(key)
        if flow is None:
            self._remember(key, self._tags.get(key, self._turns.first) + tokens)
            return
        flow.tag += tokens
        self._peak = max(self._peak, flow.tag)
        self._turns.put(flow.tag, flow.joined, flow)

    def _remember(self, key: str, tag: int) -> None:
        self._peak = max(self._peak, tag)
        if not self.flows:
            self._tags.clear()
            return
        self._tags[key] = tag
        if len(self._tags) > _MOST_REMEMBERED:
            least = sorted(self._tags, key=self._tags.__getitem__)[: _MOST_REMEMBERED // 2]
            for forgotten in least:
                del self._tags[forgotten]

    def in_turn(self, gone: Collection[Sample] = (), charged: Mapping[str, int] | None = None) -> Iterator[Sample]:
        """Yield the order of service without ageing, as if the samples ``gone`` had left and cost their keys
        ``charged``."""
        if len(self.flows) == 1:
            (flow,) = self.flows.values()
            yield from (sample for sample in flow.samples if sample not in gone) if gone else flow.samples
            return
        charged = charged or {}
        # Flows that were looked at: (tag, joined, their samples that are left).
        begun: list[tuple[int, int, Iterator[Sample]]] = []
        for key, tokens in charged.items():
            charging = self.flows[key]
            rest: Iterator[Sample] = (sample for sample in charging.samples if sample not in gone)
            heappush(begun, (charging.tag + tokens, charging.joined, rest))
        others = (entry for entry in self._turns if entry[2].key not in charged)
        other = next(others, None)
        while begun or other is not None:
            if other is not None and (not begun or other[:2] < begun[0][:2]):
                tag, joined, rest = other[0], other[1], iter(other[2].samples)
                other = next(others, None)
            else:
                tag, joined, rest = heappop(begun)
            next_tag = min(begun[0][0] if begun else inf, inf if other is None else other[0])
            for sample in rest:
                yield sample
                tag += sample.cost
                if tag >= next_tag:
                    heappush(begun, (tag, joined, rest))
                    break


class _Contender:
    """A class while classes contend by age, and what one call of ``candidates`` took of it."""

    def __init__(self, each: _PriorityClass, ageing_ns: int, now_ns: int, by_age: int | None) -> None:
        self.priority = each.priority
        self.oldest: Sample  # while anything is left
        self.rank: float = inf  # until something is found, and when nothing is left
        self._class = each
        self._ageing_ns, self._now_ns = ageing_ns, now_ns
        self._left = by_age  # samples that may go before a higher class; None: any number
        self._gone: set[Sample] = set()
        self._charged: dict[str, int] = {}
        self._by_age = iter(each.ages)
        self._turns: Iterator[Sample] | None = None
        self._find_oldest()

    def in_turn(self) -> Iterator[Sample]:
        """Return the rest by key. A class comes to this when no higher one waits: its age no longer matters."""
        if self._turns is None:
            self._turns = self._class.in_turn(self._gone, self._charged)
        return self._turns

    def take_in_turn(self) -> Sample:
        sample = next(self.in_turn())
        self._take(sample)
        return sample

    def take_oldest(self) -> Sample:
        sample = self.oldest
        key = sample.request.fairness_key
        self._charged[key] = self._charged.get(key, 0) + sample.cost
        if self._left is not None:
            self._left -= 1
        self._take(sample)
        return sample

    def _take(self, sample: Sample) -> None:
        self._gone.add(sample)
        if sample is self.oldest:
            self._find_oldest()

    def _find_oldest(self) -> None:
        for accepted_ns, _, sample in self._by_age:
            if sample not in self._gone:
                self.oldest = sample
                rises = self._left is None or self._left > 0
                self.rank = self.priority - (self._now_ns - accepted_ns) // self._ageing_ns * rises
                return
        self.rank = inf
