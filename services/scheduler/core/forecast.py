"""How many pages will be in use at every future step, exactly to the page.

A sequence that decodes takes one token of every step, so its future is known until its last possible step: a new page
whenever its length crosses a page, and everything given back at its end. Steps count from the plan being built: entry 0
is that plan, with what it holds already applied.

A prefill that takes several steps ends early when other sequences finish and leave it more of each step. Such a
sequence is taken to grow from its earliest start and to hold until its latest end, which is never less than what it
does. At most one sequence is in that state.
"""

from typing import NamedTuple

import numpy as np


class Growth(NamedTuple):
    """Pages that sequences will still take: the first at step ``first``, then one every page_size steps, ``count`` in
    all, given back at step ``end``. int64 ``[sequences]`` each."""

    first: np.ndarray
    count: np.ndarray
    end: np.ndarray


def growth(
    length: np.ndarray, limit: np.ndarray, pages: np.ndarray, end: np.ndarray, delay: np.ndarray | int, page_size: int
) -> Growth:
    """Growth of sequences with ``length`` tokens computed and ``pages`` held, which decode from step ``delay + 1`` on.

    The last token of a sequence is sampled, never computed, so it grows to ``limit - 1`` tokens.
    """
    first = delay + 1 + -length % page_size
    count = np.maximum(-(-(limit - 1) // page_size) - pages, 0)
    return Growth(first, count, end)


def page_curve(in_use: int, page_ends: np.ndarray, growing: Growth, page_size: int, horizon: int) -> np.ndarray:
    """Pages in use at steps ``0..horizon-1``: int64 ``[horizon]``.

    ``page_ends``: step at which each page in use is given back, with the last of its holders.
    """
    rows = horizon // page_size + 2
    # Pages taken: a 2-D view of time, one column for each step within a page's worth of steps. A sequence stays in its
    # column, so it is one +1 where it begins and one -1 behind its last page.
    begin_row, column = np.divmod(growing.first, page_size)
    begin = np.minimum(begin_row, rows - 1) * page_size + column
    behind = np.minimum(begin_row + growing.count, rows - 1) * page_size + column
    starts = np.bincount(begin, minlength=rows * page_size) - np.bincount(behind, minlength=rows * page_size)
    taken = np.cumsum(starts.reshape(rows, page_size), axis=0).ravel()[:horizon]
    given_back = np.bincount(np.clip(page_ends, 0, horizon), minlength=horizon + 1)
    later = np.bincount(np.clip(growing.end, 0, horizon), weights=growing.count, minlength=horizon + 1)
    return in_use + np.cumsum(taken - given_back[:horizon] - later[:horizon].astype(np.int64))


class Candidate(NamedTuple):
    """What admitting one more sequence now would add."""

    new_pages: int  # taken at once: fresh ones, and cached ones that nobody holds
    first: int  # as in `Growth`
    count: int
    end: int
    kept: np.ndarray  # ends of pages in use that it would hold longer than their present holders
    lasting: int = 0  # of all these, pages that are not given back at `end` but at an unknown time

    @property
    def peak(self) -> int:
        """Most pages it can add at any step."""
        return self.new_pages + self.count + len(self.kept)


def candidate_curve(candidate: Candidate, page_size: int, horizon: int) -> np.ndarray:
    """Pages the candidate adds at steps ``0..horizon-1``: int64 ``[horizon]``."""
    change = np.zeros(horizon + 1, np.int64)
    change[0] = candidate.new_pages
    change[candidate.first : min(horizon, candidate.first + candidate.count * page_size) : page_size] += 1
    np.add.at(change, np.clip(candidate.kept, 0, horizon), 1)
    change[min(candidate.end, horizon)] -= candidate.peak - candidate.lasting
    return np.cumsum(change)[:horizon]
