"""Random Hydragen groups of a batch."""

import numpy as np

from services.common.plan.types import NO_GROUPS, Batch, Groups, WorkerLimits

_MOST_GROUPS = 64


def random_groups(
    random: np.random.Generator,
    batch: Batch,
    table: np.ndarray,
    computed: np.ndarray,
    owned: np.ndarray,
    limits: WorkerLimits,
) -> Groups:
    """Return groups of random rows that share pages, with random parts of their prefixes, in random order.

    ``table [max_slots, max_pages]`` int32; ``computed [max_slots]`` tokens; ``owned [max_slots]`` pages.
    """
    rows = batch.slots
    if not limits.hydragen or not len(rows) or random.random() < 0.3:
        return NO_GROUPS
    full = np.minimum(computed[rows] // limits.page_size, owned[rows])  # pages that can be shared
    first = np.where(full > 0, table[rows, 0], -1 - np.arange(len(rows)))
    starts = np.flatnonzero(np.concatenate(([True], first[1:] != first[:-1])))
    stops = np.append(starts[1:], len(rows))
    able = full[starts] > 0
    if random.random() < 0.8:  # groups of one row are valid but useless
        able &= stops - starts > 1
    runs = random.permutation(np.flatnonzero(able))[:_MOST_GROUPS]
    found = []
    for start, stop in zip(starts[runs].tolist(), stops[runs].tolist(), strict=True):
        if random.random() < 0.3:
            middle = int(random.integers(start, stop))
            pieces = [(start, middle), (middle, stop)] if random.random() < 0.5 else [(middle, stop)]
        else:
            pieces = [(start, stop)]
        for begin, end in pieces:
            if begin < end:
                found.append((begin, end - begin, _prefix(random, table, rows[begin:end], full[begin:end])))
    if not found:
        return NO_GROUPS
    if random.random() < 0.3:
        found = [found[index] for index in random.permutation(len(found)).tolist()]
    return Groups(*np.array(found, np.int64).T.copy())


def _prefix(random: np.random.Generator, table: np.ndarray, rows: np.ndarray, full: np.ndarray) -> int:
    """Return a random number of the pages that all ``rows`` share."""
    most = int(full.min())
    same = (table[rows, :most] == table[rows[0], :most]).all(axis=0)
    shared = most if same.all() else int(np.argmin(same))
    return shared if random.random() < 0.7 else int(random.integers(1, shared + 1))
