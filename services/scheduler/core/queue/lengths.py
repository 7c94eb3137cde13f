"""How long answers are, learnt while they run."""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

UNKNOWN = np.iinfo(np.int64).max // 2  # a length of which the data say nothing; a prompt added to it does not overflow
MOST_LABELS = 200  # remembered at once
MOST_CLASSES = MOST_LABELS + 56  # the rest: magnitudes of limits below 2**55

_SINGLE = 64  # lengths up to this have a bin each
_RELATIVE_WIDTH = 32  # a bin behind them is as wide as its start divided by this
_LEAST_STOPS = 16  # answers that must have ended by themselves before anything is concluded from them
_LEAST_AT_RISK = 1e-6  # weight of the answers that reached a length; what is less was left by rounding
CAUTION = 0.7  # part of the last rate at which longer answers are taken to end: as a rule rates fall with length
_MEMORY = 4096  # looks that ended, of a class: what is older than so many fades


class LengthPredictor:
    """The distribution of answer lengths in each class of requests: product-limit estimates (Kaplan and Meier 1958).

    Short answers end first, so those that ended are not a fair sample. Every answer counts as at risk for as long as it
    was seen, while it runs too: from where it was seen first or looked at last to its end if it stopped by itself, to
    where it was cut off, or to its present age. So what is old fades alike for answers that ended and for those that
    run. Lengths that none has reached are guessed: there answers end at the rate of the second half of what was seen,
    if enough ended there; else that long is ``UNKNOWN``.

    Lengths are in tokens, counted in bins (edges[b], edges[b + 1]] and taken to be uniform within one. Estimates change
    with ``refresh`` only. Arrays given to one call have one length; classes, lengths, ages, limits are int64. Owned by
    the core.
    """

    def __init__(self, longest: int) -> None:
        """``longest``: the longest possible answer; one that is longer counts as this."""
        edges = [0]
        while edges[-1] < longest:
            last = edges[-1]
            edges.append(min(last + (1 if last < _SINGLE else last // _RELATIVE_WIDTH), longest))
        self.longest = longest
        self._edges = np.array(edges, np.int64)
        self._widths = np.diff(self._edges)
        self._bin = np.concatenate(([0], np.repeat(np.arange(len(self._widths)), self._widths)))  # of each length

        self._magnitudes = longest.bit_length() + 1
        self._labels: OrderedDict[str, int] = OrderedDict()  # the one unused longest is first
        self._classes = self._magnitudes  # so many have a number

        shape = (MOST_CLASSES, len(self._widths))
        self._stopped = np.zeros(shape)  # answers that ended by themselves, in each bin
        # Answers seen to the end of a bin and no further, less those seen from there on.
        self._censored = np.zeros(shape)
        self._ended = np.zeros(MOST_CLASSES)  # looks that ended, faded alike
        self._stops = np.zeros(MOST_CLASSES, np.int64)  # answers that ended by themselves, ever
        self._stale = np.zeros(MOST_CLASSES, bool)  # the estimate does not know all that is known

        edges_shape = (MOST_CLASSES, len(self._edges))
        self._known = np.zeros(MOST_CLASSES, bool)
        self._survival = np.ones(edges_shape)  # P(length > edge)
        self._area = np.zeros(edges_shape)  # sum of P(length > t) over t < edge
        # Ascending over all classes, so that one binary search serves rows of any class: a class has the numbers from
        # 2 * class to 2 * class + 1, and a survival s is the number 2 * class + 1 - s.
        self._keys = np.repeat(2.0 * np.arange(MOST_CLASSES)[:, None], len(self._edges), axis=1)
        self._spread = np.zeros(MOST_CLASSES)
        self._evidence = np.zeros(MOST_CLASSES)  # answers that ended by themselves, as far as they are remembered
        self._expected: dict[tuple[int, int], int] = {}  # of (class, limit), as long as estimates stay

    def class_of(self, label: str, max_tokens: int) -> int:
        """The class of requests with this label; without one, of those whose ``max_tokens`` has as many binary digits.

        ``MOST_LABELS`` labels have a class at once. One more takes the class of the label unused longest, of which
        nothing is known from then on. Whoever holds that class for the old label may go on: what its answers still
        teach goes to the new one, and their lengths are predicted as those of the new one.
        """
        if not label:
            return min(max_tokens.bit_length(), self._magnitudes - 1)
        if label in self._labels:
            self._labels.move_to_end(label)
        elif len(self._labels) < MOST_LABELS:
            self._labels[label] = self._classes
            self._classes += 1
        else:
            _, taken = self._labels.popitem(last=False)
            self._forget(taken)
            self._labels[label] = taken
        return self._labels[label]

    def observe(self, classes: np.ndarray, lengths: np.ndarray, stopped: np.ndarray, since: np.ndarray) -> None:
        """Answers ended. ``stopped``: bool, by themselves; the others would have been longer than ``lengths``.

        ``since``: ages at which they were looked at last, or seen first.
        """
        ends = classes[stopped]
        bins = self._bin[np.clip(lengths[stopped], 1, self.longest)]
        np.add.at(self._stopped, (ends, bins), 1.0)
        self._see(classes[~stopped], lengths[~stopped], 1.0)
        self._see(classes, np.minimum(since, lengths), -1.0)
        np.add.at(self._stops, ends, 1)
        np.add.at(self._ended, classes, 1.0)

    def refresh(self, classes: np.ndarray, ages: np.ndarray, since: np.ndarray) -> None:
        """Look at everything that runs, with the tokens it has so far, and estimate anew. ``since``: as above."""
        self._see(classes, ages, 1.0)
        self._see(classes, np.minimum(since, ages), -1.0)
        rows = np.flatnonzero(self._stale)
        self._stale[rows] = False
        self._estimate(rows)
        self._expected.clear()
        # Only now: what ended and what runs have been looked at up to the same moment.
        full = np.flatnonzero(self._ended > _MEMORY)
        kept = _MEMORY / self._ended[full]
        self._stopped[full] *= kept[:, None]
        self._censored[full] *= kept[:, None]
        self._ended[full] = _MEMORY

    def draw(self, classes: _Ints, ages: _Ints, quantiles: _Floats) -> _Ints:
        """The ``quantiles`` in (0, 1) of the lengths of answers that are longer than ``ages``: int64, above the age.

        ``UNKNOWN`` for a class of which little is known, and where the quantile is behind all that the data tell.
        """
        target = self._survival_at(classes, ages)
        known = self._known[classes] & (target > 0)
        target *= 1 - quantiles
        known &= target >= self._survival[classes, -1]
        # The first edge that no more than this survive.
        found = np.searchsorted(self._keys[: self._classes].ravel(), (2.0 * classes + 1) - target)
        before = np.clip(found - classes * len(self._edges), 1, len(self._widths)) - 1
        above, below = self._survival[classes, before], self._survival[classes, before + 1]
        share = (above - target) / np.maximum(above - below, np.finfo(np.float64).tiny)
        width = self._widths[before]
        inside = np.ceil(np.clip(share, 0, 1) * width).astype(np.int64)
        return np.where(known, np.maximum(self._edges[before] + inside, ages + 1), UNKNOWN)

    def mean(self, classes: _Ints, ages: _Ints, limits: _Ints) -> _Floats:
        """Expected lengths of answers that are longer than ``ages`` and cut off at ``limits``: float64.

        What is ``UNKNOWN`` counts as cut off.
        """
        survival = self._survival_at(classes, ages)
        known = self._known[classes] & (survival > 0) & (ages < limits)
        rest = self._area_at(classes, limits) - self._area_at(classes, ages)
        return np.minimum(limits, np.where(known, ages + rest / np.where(known, survival, 1), limits))

    def expected(self, row: int, limit: int) -> int:
        """``mean`` of one new answer of the class ``row``: quicker, as requests of a class are often alike."""
        if not self._known[row]:
            return limit
        if (row, limit) not in self._expected:
            mean = self.mean(np.array([row]), np.zeros(1, np.int64), np.array([limit]))
            self._expected[row, limit] = int(mean[0])
        return self._expected[row, limit]

    def spread(self, classes: _Ints) -> _Floats:
        """Standard deviation of a length, float64; 0 for a class of which little is known.

        What is ``UNKNOWN`` counts as if it ended with the longest answer that was seen.
        """
        return self._spread[classes]

    def deviation(self, counts: np.ndarray) -> float:
        """Standard deviation of the sum of the lengths of ``counts[c]`` answers of every class c, in tokens: of the
        lengths themselves, and of what the mean of a class may be off. ``counts``: int64 ``[MOST_CLASSES]``."""
        return float(np.sqrt((self._spread**2 * (counts + counts**2 / np.maximum(self._evidence, 1.0))).sum()))

    def _forget(self, row: int) -> None:
        """As if no answer of this class had been seen.

        Every look adds a whole interval of ages, so later looks at an answer that was seen before leave counts >= 0.
        """
        for counts in (self._stopped, self._censored, self._ended, self._stops):
            counts[row] = 0
        for estimates in (self._area, self._spread, self._evidence):
            estimates[row] = 0.0
        self._stale[row] = self._known[row] = False
        self._expected.clear()
        self._survival[row] = 1.0
        self._keys[row] = 2.0 * row

    def _see(self, classes: np.ndarray, ages: np.ndarray, weight: float) -> None:
        """Answers were seen up to ``ages``, with ``weight``.

        One seen through a part of its last bin is at risk there with this part of its weight. In the first bin the part
        is 0, nothing seen, or 1: either way nothing is left for a bin before.
        """
        ages = np.clip(ages, 0, self.longest)
        last = self._bin[ages]
        part = (ages - self._edges[last]) / self._widths[last]
        np.add.at(self._censored, (classes, last), weight * part)
        np.add.at(self._censored, (classes, np.maximum(last - 1, 0)), np.where(last > 0, weight * (1 - part), 0.0))
        self._stale[classes] = True

    def _estimate(self, rows: np.ndarray) -> None:
        """Estimates of the classes ``rows``."""
        stopped = self._stopped[rows]
        at_risk = np.cumsum((stopped + self._censored[rows])[:, ::-1], axis=1)[:, ::-1]
        seen = at_risk >= _LEAST_AT_RISK
        longest = np.where(seen, self._edges[1:], 0).max(axis=1)
        guessed = (1 - CAUTION * self._last_rate(stopped, at_risk, longest)[:, None]) ** self._widths
        stay = np.where(seen, 1 - np.minimum(stopped / np.maximum(at_risk, _LEAST_AT_RISK), 1), guessed)
        survival = np.ones((len(rows), len(self._edges)))
        np.cumprod(stay, axis=1, out=survival[:, 1:])
        ends = survival[:, :-1] - survival[:, 1:]
        area = np.zeros_like(survival)
        np.cumsum(survival[:, :-1] * self._widths - ends * ((self._widths - 1) / 2), axis=1, out=area[:, 1:])
        known = self._stops[rows] >= _LEAST_STOPS
        self._known[rows], self._survival[rows], self._area[rows] = known, survival, area
        self._evidence[rows] = stopped.sum(axis=1)
        self._keys[rows] = (2.0 * rows[:, None] + 1) - survival
        self._spread[rows] = np.where(known, self._deviation(ends, survival[:, -1], longest), 0.0)

    def _last_rate(self, stopped: np.ndarray, at_risk: np.ndarray, longest: np.ndarray) -> np.ndarray:
        """Stops per token over the second half of the lengths that were seen, 0 when there were few: float64 [rows]."""
        last = (self._edges[1:] > longest[:, None] // 2) & (self._edges[1:] <= longest[:, None])
        tokens = np.where(last, at_risk * self._widths, 0.0).sum(axis=1)
        stops = np.where(last, stopped, 0.0).sum(axis=1)
        return np.where(stops >= _LEAST_STOPS, np.minimum(stops / np.maximum(tokens, _LEAST_AT_RISK), 1), 0.0)

    def _deviation(self, ends: _Floats, rest: _Floats, longest: _Ints) -> _Floats:
        """Standard deviations of lengths of which ``ends`` are in each bin and ``rest`` are ``longest``."""
        middle = self._edges[:-1] + (self._widths + 1) / 2
        square = middle**2 + (self._widths**2 - 1) / 12
        mean = ends @ middle + rest * longest
        return np.sqrt(np.maximum(ends @ square + rest * longest**2 - mean**2, 0))

    def _survival_at(self, classes: _Ints, ages: _Ints) -> _Floats:
        """P(length > age)."""
        ages = np.minimum(ages, self.longest)
        at = self._bin[ages]
        above, below = self._survival[classes, at], self._survival[classes, at + 1]
        share: _Floats = above - (above - below) * ((ages - self._edges[at]) / self._widths[at])
        return share

    def _area_at(self, classes: _Ints, ages: _Ints) -> _Floats:
        """Sum of P(length > t) over t < age."""
        inside = np.minimum(ages, self.longest)
        at = self._bin[inside]
        above, below = self._survival[classes, at], self._survival[classes, at + 1]
        into, width = inside - self._edges[at], self._widths[at]
        behind = (ages - inside) * self._survival[classes, -1]
        gone = (above - below) * (into * (into - 1) / (2 * width))
        area: _Floats = self._area[classes, at] + into * above - gone + behind
        return area
