"""The queue of samples that are accepted and not running: priority classes, ageing, fairness between keys."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import count, groupby, islice
from math import inf
from operator import attrgetter

from services.scheduler.core.lazy_heap import LazyHeap
from services.scheduler.core.request import Priority, Sample

QUANTUM = 4096  # tokens that a fairness key may take in each round


class WaitingQueue:
    """Who is served next: the class of lowest rank, and within it each fairness key in turn. Owned by the core.

    A class ranks as its priority, less one for every ``ageing_ns`` that its oldest sample waited; of equal ranks the
    higher class goes first. When a class goes before a higher one, which only age can bring about, its oldest sample is
    served. Otherwise its keys are served by deficit round robin (Shreedhar and Varghese 1996), each key first come,
    first served. With ``ageing_ns`` 0 priorities are strict.

    A call's cost grows with the samples it is about, and with the logarithm at most of all that wait. ``arrival`` must
    differ between samples: it settles equal ages.
    """

    def __init__(self, ageing_ns: int) -> None:
        self.tokens = 0  # outstanding tokens of all samples here
        self._length = 0
        self._ageing_ns = ageing_ns
        self._classes = [_PriorityClass(priority, ageing=ageing_ns > 0) for priority in Priority]

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sample]:
        """Every sample once: class by class and key by key, not in the order of service."""
        for each in self._classes:
            for flow in each.flows.values():
                yield from flow.samples

    def __contains__(self, sample: Sample) -> bool:
        flow = self._classes[sample.request.priority].flows.get(sample.request.fairness_key)
        return flow is not None and sample in flow.samples

    def push(self, sample: Sample) -> None:
        """As the last of its key in its class."""
        self._classes[sample.request.priority].push(sample)
        self._count(sample, 1)

    def push_front(self, sample: Sample) -> None:
        """As the first of its key in its class: a sample that was running before."""
        self._classes[sample.request.priority].push(sample, front=True)
        self._count(sample, 1)

    def remove(self, sample: Sample) -> None:
        """It leaves unserved, so its key is charged nothing. ``KeyError`` when it is not here."""
        self._classes[sample.request.priority].take(sample.request.fairness_key, (sample,))
        self._count(sample, -1)

    def serve(self, samples: Sequence[Sample]) -> None:
        """They leave to run, and their keys are charged: some of what ``candidates`` said, in its order.

        ``KeyError`` when one is not here.
        """
        for (priority, key), run in groupby(samples, attrgetter("request.priority", "request.fairness_key")):
            served = list(run)
            # Age takes samples out of turn: the round of a class goes on only when no higher class waits.
            in_turn = not any(higher.flows for higher in self._classes[:priority])
            cost = sum(sample.cost for sample in served)
            self._classes[priority].take(key, served, cost=cost, in_turn=in_turn)
            for sample in served:
                self._count(sample, -1)

    @property
    def highest(self) -> Priority | None:
        """The highest class in which a sample waits."""
        return next((each.priority for each in self._classes if each.flows), None)

    def candidates(self, most: int, now_ns: int, low_by_age: int | None = None) -> list[Sample]:
        """The next ``most`` samples in the order of service, as if each was served now. Nothing changes.

        ``low_by_age``: so many samples of class ``low`` at most go before higher classes; None: any number.
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

    __slots__ = ("key", "position", "round", "samples", "spent")

    def __init__(self, key: str, position: tuple[int, int], spent: int) -> None:
        self.key = key
        self.position = position  # in every round: those that joined last come first, of one round in order
        # Tokens served, as if it had been here from round 0 and never saved any: the deficit in round r is
        # r * QUANTUM - spent. The rounds that a key must gather for a large sample are then one division.
        self.spent = spent
        self.round = -1  # in which the first sample is served
        self.samples: OrderedDict[Sample, None] = OrderedDict()


class _PriorityClass:
    """Deficit round robin over the keys of one class."""

    def __init__(self, priority: Priority, *, ageing: bool) -> None:
        self.priority = priority
        self.flows: dict[str, _Flow] = {}  # those with samples; one that is empty is forgotten, deficit and all
        self.ages: LazyHeap[int, Sample] = LazyHeap()  # by (accepted_ns, arrival); empty without ageing
        self._turns: LazyHeap[tuple[int, int], _Flow] = LazyHeap()  # by (round, position)
        self._ageing = ageing
        self._round = 0  # the latest in which a sample was served
        self._joined = count()

    def push(self, sample: Sample, *, front: bool = False) -> None:
        key = sample.request.fairness_key
        flow = self.flows.get(key)
        if flow is None:
            # From the next round on, for one that comes and goes would else have many turns in this one; and there
            # before those that had their turn in this round already.
            flow = self.flows[key] = _Flow(key, (-self._round, next(self._joined)), self._round * QUANTUM)
            front = True
        flow.samples[sample] = None
        if front:
            flow.samples.move_to_end(sample, last=False)
            self._settle(flow)
        if self._ageing:
            self.ages.put(sample.accepted_ns, sample.arrival, sample)

    def take(self, key: str, samples: Iterable[Sample], *, cost: int = 0, in_turn: bool = False) -> None:
        """Samples of one key leave, for ``cost`` tokens; ``in_turn``: the round goes on to where they were served."""
        flow = self.flows[key]
        for sample in samples:
            del flow.samples[sample]
            if self._ageing:
                self.ages.discard(sample)
        flow.spent += cost
        if in_turn:
            self._round = max(self._round, _round(flow.spent))
        self._settle(flow)

    def _settle(self, flow: _Flow) -> None:
        """Bring its turn up to date after its first sample, or what it spent, changed."""
        head = next(iter(flow.samples), None)
        if head is None:
            del self.flows[flow.key]
            self._turns.discard(flow)
            return
        turn = _round(flow.spent + head.cost)
        if turn != flow.round:
            flow.round = turn
            self._turns.put(turn, flow.position, flow)

    def in_turn(self, gone: Collection[Sample] = (), charged: Mapping[str, int] | None = None) -> Iterator[Sample]:
        """The order of service without ageing, as if the samples ``gone`` had left and cost their keys ``charged``."""
        if len(self.flows) == 1:
            (flow,) = self.flows.values()
            yield from (sample for sample in flow.samples if sample not in gone) if gone else flow.samples
            return
        charged = charged or {}
        # Flows that were looked at: (round, position, tokens spent, its next sample, those behind it).
        begun: list[tuple[int, tuple[int, int], int, Sample, Iterator[Sample]]] = []
        for key, tokens in charged.items():
            flow = self.flows[key]
            rest: Iterator[Sample] = (sample for sample in flow.samples if sample not in gone)
            for sample in rest:
                spent = flow.spent + tokens
                heappush(begun, (_round(spent + sample.cost), flow.position, spent, sample, rest))
                break
        others = (entry for entry in self._turns if entry[2].key not in charged)
        other = next(others, None)
        while begun or other is not None:
            # No two have the same position: what stands behind it, which typeshed wants alike, is never compared.
            if other is not None and (not begun or other < begun[0]):  # type: ignore[operator]
                turn, position, flow = other
                other = next(others, None)
                rest = iter(flow.samples)
                spent, sample = flow.spent, next(rest)
            else:
                turn, position, spent, sample, rest = heappop(begun)
            yield sample
            spent += sample.cost
            for sample in rest:
                if spent + sample.cost > turn * QUANTUM:
                    heappush(begun, (_round(spent + sample.cost), position, spent, sample, rest))
                    break
                yield sample
                spent += sample.cost


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
        """The rest by key. A class comes to this when no higher one waits: no more of its samples go by age."""
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


def _round(tokens: int) -> int:
    """The first round in which so many tokens may be spent in all."""
    return -(-tokens // QUANTUM)
