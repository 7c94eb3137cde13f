"""Prediction of answer lengths, from answers that ended and answers that run."""

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]

UNKNOWN = np.iinfo(np.int64).max // 2  # a length that cannot be estimated; it can be added to a prompt without overflow
MOST_LABELS = 200  # labels with a class at the same time
MOST_CLASSES = MOST_LABELS + 56  # 56 classes by the magnitude of limits below 2**55

_SINGLE = 64  # each length up to this has its own bin
_RELATIVE_WIDTH = 32  # the width of a later bin is its start divided by this
_LEAST_STOPS = 16  # stopped answers that an estimate needs
_LEAST_AT_RISK = 1e-6  # least weight of the answers that reached a length; smaller values are rounding errors
CAUTION = 0.7  # assumed rate of ends beyond the data, relative to the last known rate: rates fall with length
_MEMORY = 4096  # observations of ended answers that a class keeps at full weight


class LengthPredictor:
    """The distribution of answer lengths in each class of requests: product-limit estimates (Kaplan and Meier 1958).

    Short answers end first, so the ended answers alone would be a biased sample. Every answer, ended or running,
    counts as at risk over the ages at which it was observed. An observation begins at age 0 or at the end of the
    previous observation. It ends where the answer stopped or was cut off, or at its present age. So old observations
    of ended and of running answers fade alike. Beyond the longest observed length, answers are assumed to end at a rate
    that follows from the second half of the observed lengths, if enough answers stopped there. Otherwise such a length
    is ``UNKNOWN``.

    Lengths are in tokens. They are counted in bins (edges[b], edges[b + 1]] and assumed to be uniform within a bin.
    Only ``refresh`` changes estimates. The arrays of a call have the same length. Classes, lengths, ages and limits are
    int64. Owned by the core.
    """

    def __init__(self, longest: int) -> None:
        """``longest`` is the longest possible answer. A longer answer counts as ``longest``."""
        edges = [0]
        while edges[-1] < longest:
            last = edges[-1]
            edges.append(min(last + (1 if last < _SINGLE else last // _RELATIVE_WIDTH), longest))
        self.longest = longest
        self._edges = np.array(edges, np.int64)
        self._widths = np.diff(self._edges)
        self._bin = np.concatenate(([0], np.repeat(np.arange(len(self._widths)), self._widths)))  # bin of each length

        self._magnitudes = longest.bit_length() + 1
        self._labels: OrderedDict[str, int] = OrderedDict()  # least recently used first
        self._classes = self._magnitudes  # number of classes in use

        shape = (MOST_CLASSES, len(self._widths))
        self._stopped = np.zeros(shape)  # answers that stopped, by bin
        # Observations that end at the end of a bin, less those that begin there.
        self._censored = np.zeros(shape)
        self._ended = np.zeros(MOST_CLASSES)  # observations that ended, faded likewise
        self._stops = np.zeros(MOST_CLASSES, np.int64)  # answers that stopped, never faded
        self._stale = np.zeros(MOST_CLASSES, bool)  # there are observations since the last estimate

        edges_shape = (MOST_CLASSES, len(self._edges))
        self._known = np.zeros(MOST_CLASSES, bool)
        self._survival = np.ones(edges_shape)  # P(length > edge)
        self._area = np.zeros(edges_shape)  # sum of P(length > t) over t < edge
        # Survivals as keys that ascend over all classes, so that one binary search serves rows of any class. A survival
        # s of class c has the key 2 * c + 1 - s.
        self._keys = np.repeat(2.0 * np.arange(MOST_CLASSES)[:, None], len(self._edges), axis=1)
        self._spread = np.zeros(MOST_CLASSES)
        self._evidence = np.zeros(MOST_CLASSES)  # answers that stopped, faded
        self._expected: dict[tuple[int, int], int] = {}  # by (class, limit), until the next estimate

    def class_of(self, label: str, max_tokens: int) -> int:
        """Return the class of a label. Without a label, the number of binary digits of ``max_tokens`` is the class.

        ``MOST_LABELS`` labels have a class at the same time. A further label takes the class of the least recently used
        label, and the observations of that label are dropped. Running requests of the old label keep the class, so
        they are predicted like those of the new label, and are observed for it.
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
        """Record answers that ended.

        ``stopped`` is bool. Answers that did not stop were cut off at ``lengths``. ``since`` are the ages at the last
        observation, or 0.
        """
        ends = classes[stopped]
        bins = self._bin[np.clip(lengths[stopped], 1, self.longest)]
        np.add.at(self._stopped, (ends, bins), 1.0)
        self._see(classes[~stopped], lengths[~stopped], 1.0)
        self._see(classes, np.minimum(since, lengths), -1.0)
        np.add.at(self._stops, ends, 1)
        np.add.at(self._ended, classes, 1.0)

    def refresh(self, classes: np.ndarray, ages: np.ndarray, since: np.ndarray) -> None:
        """Record all running answers at their present ``ages``, and estimate again. ``since`` is as for ``observe``."""
        self._see(classes, ages, 1.0)
        self._see(classes, np.minimum(since, ages), -1.0)
        rows = np.flatnonzero(self._stale)
        self._stale[rows] = False
        self._estimate(rows)
        self._expected.clear()
        # Fading waits until now, when ended and running answers are recorded up to the same moment.
        full = np.flatnonzero(self._ended > _MEMORY)
        kept = _MEMORY / self._ended[full]
        self._stopped[full] *= kept[:, None]
        self._censored[full] *= kept[:, None]
        self._ended[full] = _MEMORY

    def draw(self, classes: _Ints, ages: _Ints, quantiles: _Floats) -> _Ints:
        """Return the ``quantiles`` in (0, 1) of the lengths of answers longer than ``ages``: int64, above the age.

        ``UNKNOWN`` for a class with too few observations, and for a quantile beyond the estimate.
        """
        known = self._known[classes]
        if not known.any():
            return np.full(len(classes), UNKNOWN)
        target = self._survival_at(classes, ages)
        known &= target > 0
        target *= 1 - quantiles
        known &= target >= self._survival[classes, -1]
        # The first edge with at most this survival.
        found = np.searchsorted(self._keys[: self._classes].ravel(), (2.0 * classes + 1) - target)
        before = np.clip(found - classes * len(self._edges), 1, len(self._widths)) - 1
        above, below = self._survival[classes, before], self._survival[classes, before + 1]
        share = (above - target) / np.maximum(above - below, np.finfo(np.float64).tiny)
        width = self._widths[before]
        inside = np.ceil(np.clip(share, 0, 1) * width).astype(np.int64)
        return np.where(known, np.maximum(self._edges[before] + inside, ages + 1), UNKNOWN)

    def mean(self, classes: _Ints, ages: _Ints, limits: _Ints) -> _Floats:
        """Return the expected lengths of answers that are longer than ``ages`` and cut off at ``limits``: float64.

        A length that is ``UNKNOWN`` counts as cut off.
        """
        survival = self._survival_at(classes, ages)
        known = self._known[classes] & (survival > 0) & (ages < limits)
        rest = self._area_at(classes, limits) - self._area_at(classes, ages)
        return np.minimum(limits, np.where(known, ages + rest / np.where(known, survival, 1), limits))

    def expected(self, row: int, limit: int) -> int:
        """Return ``mean`` of a new answer of the class ``row``. Cached, as limits are often equal."""
        if not self._known[row]:
            return limit
        if (row, limit) not in self._expected:
            mean = self.mean(np.array([row]), np.zeros(1, np.int64), np.array([limit]))
            self._expected[row, limit] = int(mean[0])
        return self._expected[row, limit]

    def spread(self, classes: _Ints) -> _Floats:
        """Return the standard deviations of lengths: float64, and 0 for a class with too few observations.

        A length that is ``UNKNOWN`` counts as the longest observed length.
        """
        return self._spread[classes]

    def deviation(self, counts: np.ndarray) -> float:
        """Return the standard deviation of the total length of ``counts[c]`` answers of every class c, in tokens.

        It includes the deviation of the lengths and the error of the means. ``counts`` is int64 ``[MOST_CLASSES]``.
        """
        return float(np.sqrt((self._spread**2 * (counts + counts**2 / np.maximum(self._evidence, 1.0))).sum()))

    def _forget(self, row: int) -> None:
        """Drop all observations of a class.

        An observation adds a whole interval of ages, so later observations of its running answers keep counts >= 0.
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
        """Record the end of observations at ``ages`` with ``weight``, or their beginning with a negative weight.

        An observation of a part of its last bin counts there with this part of its weight. In the first bin the part is
        0 or 1, so no weight is left for a bin before it.
        """
        ages = np.clip(ages, 0, self.longest)
        last = self._bin[ages]
        part = (ages - self._edges[last]) / self._widths[last]
        np.add.at(self._censored, (classes, last), weight * part)
        np.add.at(self._censored, (classes, np.maximum(last - 1, 0)), np.where(last > 0, weight * (1 - part), 0.0))
        self._stale[classes] = True

    def _estimate(self, rows: np.ndarray) -> None:
        """Estimate the classes ``rows``."""
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
        """Return the stops per token in the second half of the observed lengths: float64 [rows], 0 if they are few."""
        last = (self._edges[1:] > longest[:, None] // 2) & (self._edges[1:] <= longest[:, None])
        tokens = np.where(last, at_risk * self._widths, 0.0).sum(axis=1)
        stops = np.where(last, stopped, 0.0).sum(axis=1)
        return np.where(stops >= _LEAST_STOPS, np.minimum(stops / np.maximum(tokens, _LEAST_AT_RISK), 1), 0.0)

    def _deviation(self, ends: _Floats, rest: _Floats, longest: _Ints) -> _Floats:
        """Return the standard deviations of lengths with the parts ``ends`` in each bin and ``rest`` at ``longest``."""
        middle = self._edges[:-1] + (self._widths + 1) / 2
        square = middle**2 + (self._widths**2 - 1) / 12
        mean = ends @ middle + rest * longest
        return np.sqrt(np.maximum(ends @ square + rest * longest**2 - mean**2, 0))

    def _survival_at(self, classes: _Ints, ages: _Ints) -> _Floats:
        """Return P(length > age)."""
        ages = np.minimum(ages, self.longest)
        at = self._bin[ages]
        above, below = self._survival[classes, at], self._survival[classes, at + 1]
        share: _Floats = above - (above - below) * ((ages - self._edges[at]) / self._widths[at])
        return share

    def _area_at(self, classes: _Ints, ages: _Ints) -> _Floats:
        """Return the sum of P(length > t) over t < age."""
        inside = np.minimum(ages, self.longest)
        at = self._bin[inside]
        above, below = self._survival[classes, at], self._survival[classes, at + 1]
        into, width = inside - self._edges[at], self._widths[at]
        behind = (ages - inside) * self._survival[classes, -1]
        gone = (above - below) * (into * (into - 1) / (2 * width))
        area: _Floats = self._area[classes, at] + into * above - gone + behind
        return area
