"""Spans of rows are cut into tiles, and their pages and rows laid behind each other."""

import numpy as np

from services.worker.attention.spans import Spans, packed, page_lists, tiles


def spans(*rows: tuple[int, int, int, int]) -> Spans:
    return Spans(*(np.array(column, np.int32) for column in zip(*rows, strict=True)))


def test_tiles_cover_their_spans_with_the_longest_first():
    made = tiles(spans((0, 5, 1, 20), (5, 2, 3, 40)), 4, causal=True)
    assert made.tolist() == [[5, 2, 3, 39, 40], [4, 1, 1, 20, 20], [0, 4, 1, 16, 19]]
    made = tiles(spans((0, 5, 1, 20), (5, 2, 3, 40)), 4, causal=False)
    assert made.tolist() == [[5, 2, 3, 40, 40], [0, 4, 1, 20, 20], [4, 1, 1, 20, 20]]


def test_pages_of_spans_lie_behind_each_other():
    table = np.arange(20, dtype=np.int32).reshape(2, 10)
    lists = page_lists(spans((0, 1, 1, 5), (1, 1, 0, 8)), table, 4)
    assert lists.pages.tolist() == [10, 11, 0, 1]
    assert lists.offsets.tolist() == [0, 2, 4]
    assert lists.last_tokens.tolist() == [1, 4]


def test_few_rows_between_spans_are_taken_along_and_many_are_left_out():
    rows, begins = packed(spans((3, 10, 0, 16), (14, 10, 1, 16)))
    assert (rows, begins.tolist()) == (slice(3, 24), [0, 11, 21])
    rows, begins = packed(spans((3, 2, 0, 16), (14, 3, 1, 16)))
    assert (rows.tolist(), begins.tolist()) == ([3, 4, 14, 15, 16], [0, 2, 5])
