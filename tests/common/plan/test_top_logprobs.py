"""Rows of ragged log-probabilities, against lists."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.common.plan.top_logprobs import TopLogprobs

ROWS = st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=3), max_size=6)


def made(rows: list[list[int]]) -> TopLogprobs:
    tokens = [token for row in rows for token in row]
    logprobs = -np.arange(len(tokens), dtype=np.float32)
    return TopLogprobs(np.array([len(row) for row in rows], np.int64), np.array(tokens, np.uint32), logprobs)


def listed(top: TopLogprobs) -> list[list[int]]:
    ends = np.cumsum(top.counts).tolist()
    return [top.token_ids[end - count : end].tolist() for end, count in zip(ends, top.counts.tolist(), strict=True)]


@given(ROWS, st.data())
def test_rows_are_chosen_by_position_by_mask_and_by_slice(rows, data):
    top = made(rows)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    mask = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    cut = slice(data.draw(st.integers(0, 6)), data.draw(st.integers(0, 6)))
    by_mask = [row for row, kept in zip(rows, mask, strict=True) if kept]
    for chosen, expected in (
        (top[np.array(order, np.int64)], [rows[index] for index in order]),
        (top[np.array(mask, bool)], by_mask),
        (top[cut], rows[cut]),
    ):
        assert listed(chosen) == expected
        assert chosen.whole
        assert len(chosen) == len(expected)


@given(st.lists(st.tuples(ROWS, st.booleans()), max_size=4))
def test_parts_are_joined_in_order_and_missing_ones_have_no_tokens(parts):
    joined = TopLogprobs.join(
        [made(rows) if given_ else None for rows, given_ in parts], [len(rows) for rows, _ in parts]
    )
    if not any(given_ for _, given_ in parts):
        assert joined is None
        return
    assert listed(joined) == [row if given_ else [] for rows, given_ in parts for row in rows]


def test_arrays_that_do_not_fit_each_other_are_not_whole():
    assert made([[1], [2, 3]]).whole
    assert not TopLogprobs(np.array([2]), np.array([1]), np.zeros(1, np.float32)).whole
    assert not TopLogprobs(np.array([1]), np.array([1]), np.zeros(0, np.float32)).whole
