"""Hydragen groups: the deepest that pay, the rest rolled up, against a recursion over the tree."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.memory.hydragen import HydragenPolicy, choose_groups

FREE = HydragenPolicy(min_group_size=2, min_prefix_len=1, row_cost=0, group_cost=0, call_cost=0)
ROOT = 0


def build(*nodes: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Parents and depths of (parent, pages) in order; the first becomes node 1."""
    parent, depth = [-1], [0]
    for above, pages in nodes:
        parent.append(above)
        depth.append(depth[above] + pages)
    return np.array(parent, np.int32), np.array(depth, np.int32)


def rows(**counts: int) -> np.ndarray:
    """``rows(n3=2)``: two rows that hang on node 3."""
    return np.array([int(name[1:]) for name, count in counts.items() for _ in range(count)], np.int64)


@st.composite
def policies(draw) -> HydragenPolicy:
    return HydragenPolicy(
        min_group_size=draw(st.integers(1, 6)),
        min_prefix_len=draw(st.integers(1, 20)),
        row_cost=draw(st.integers(0, 8)),
        group_cost=draw(st.integers(0, 60)),
        call_cost=draw(st.sampled_from([0, 0, 0, 40, 150])),
    )


@st.composite
def forests(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Parents, depths, the nodes of rows, and which nodes are in the tree: numbers come in no order, and some nodes
    have left the tree and kept what they said last."""
    count = draw(st.integers(0, 25))
    numbers = [ROOT, *draw(st.permutations(range(1, count + 1)))]
    parent, depth = np.full(count + 1, -1, np.int32), np.zeros(count + 1, np.int32)
    for at in range(1, count + 1):
        above = numbers[draw(st.integers(max(0, at - draw(st.sampled_from([1, 3, 25]))), at - 1))]
        parent[numbers[at]], depth[numbers[at]] = above, depth[above] + draw(st.integers(1, 4))
    live = np.ones(count + 1, bool)
    for node in numbers[:0:-1]:
        if not live[parent == node].any() and draw(st.integers(0, 4)) == 0:
            live[node], depth[node] = False, draw(st.integers(0, 99))
    nodes = draw(st.lists(st.sampled_from(np.flatnonzero(live).tolist()), max_size=60))
    return parent, depth, np.array(nodes, np.int64), live


def naive(parent, depth, row_nodes, page_size, policy) -> dict[int, int]:
    """Rows of each group's node: the search as the paper tells it, from every leaf back to the root."""
    found: dict[int, int] = {}

    def visit(node: int) -> int:
        """Rows at or below ``node`` that no group took."""
        left = row_nodes.count(node) + sum(visit(child) for child, above in enumerate(parent) if above == node)
        tokens = depth[node] * page_size
        enough = left >= policy.min_group_size and tokens >= policy.min_prefix_len
        if node != ROOT and enough and policy.gain(left, tokens) > 0:
            found[node] = left
            return 0
        return left

    visit(ROOT)
    total = sum(policy.gain(count, depth[node] * page_size) for node, count in found.items())
    return found if total > policy.call_cost else {}


def path(parent: np.ndarray, node: int) -> list[int]:
    """From ``node`` up, without the root."""
    nodes = []
    while node > ROOT:
        nodes.append(node)
        node = int(parent[node])
    return nodes


@given(forests(), st.sampled_from([1, 3, 16]), policies())
def test_groups_are_those_of_a_search_from_the_leaves(forest, page_size, policy):
    parent, depth, row_nodes, live = forest
    tops = naive(parent.tolist(), depth.tolist(), row_nodes.tolist(), page_size, policy)
    of_node, prefix_pages = choose_groups(parent, depth, row_nodes, page_size, policy)
    assert of_node.dtype == np.int32
    assert prefix_pages.dtype == np.int64
    assert prefix_pages.tolist() == [depth[node] for node in sorted(tops)]
    for node in np.flatnonzero(live).tolist():
        top = next((above for above in path(parent, node) if above in tops), None)
        assert of_node[node] == (-1 if top is None else sorted(tops).index(top))


@given(forests(), st.sampled_from([1, 3, 16]), policies())
def test_a_group_is_large_and_long_enough_and_its_rows_share_its_prefix(forest, page_size, policy):
    parent, depth, row_nodes, _ = forest
    of_node, prefix_pages = choose_groups(parent, depth, row_nodes, page_size, policy)
    group_of_row = of_node[row_nodes]
    for group, pages in enumerate(prefix_pages.tolist()):
        members = row_nodes[group_of_row == group].tolist()
        assert len(members) >= policy.min_group_size
        assert pages * page_size >= policy.min_prefix_len
        assert policy.gain(len(members), pages * page_size) > 0
        shared = set.intersection(*(set(path(parent, node)) for node in members))
        assert pages in depth[sorted(shared)]
    assert set(group_of_row.tolist()) <= {-1, *range(len(prefix_pages))}
    assert of_node[ROOT] == -1


@given(forests(), st.randoms())
def test_the_order_of_the_rows_does_not_matter(forest, random):
    parent, depth, row_nodes, _ = forest
    shuffled = row_nodes.tolist()
    random.shuffle(shuffled)
    one = choose_groups(parent, depth, row_nodes, 4, FREE)
    other = choose_groups(parent, depth, np.array(shuffled, np.int64), 4, FREE)
    assert all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


def test_the_deepest_node_with_enough_rows_takes_them():
    parent, depth = build((ROOT, 2), (1, 3), (2, 1), (2, 1))
    of_node, prefix_pages = choose_groups(parent, depth, rows(n3=2, n4=2), 16, FREE)
    assert prefix_pages.tolist() == [6, 6]
    assert of_node.tolist() == [-1, -1, -1, 0, 1]


def test_rows_that_are_too_few_roll_up_until_they_are_enough():
    parent, depth = build((ROOT, 2), (1, 3), (2, 1), (2, 1), (1, 1))
    of_node, prefix_pages = choose_groups(parent, depth, rows(n3=1, n4=1, n5=1), 16, FREE)
    assert prefix_pages.tolist() == [5]
    assert of_node.tolist() == [-1, -1, 0, 0, 0, -1]  # one row alone stays at node 1, the deeper group took the others


def test_what_deeper_groups_leave_becomes_a_group_above_them():
    parent, depth = build((ROOT, 2), (1, 3), (1, 1), (1, 1))
    of_node, prefix_pages = choose_groups(parent, depth, rows(n2=2, n3=1, n4=1), 16, FREE)
    assert prefix_pages.tolist() == [2, 5]
    assert of_node.tolist() == [-1, 0, 1, 0, 0]


def test_rows_of_a_group_that_would_not_pay_roll_up():
    policy = HydragenPolicy(min_group_size=2, min_prefix_len=1, row_cost=0, group_cost=100, call_cost=0)
    parent, depth = build((ROOT, 4), (1, 1), (1, 1))
    of_node, prefix_pages = choose_groups(parent, depth, rows(n2=2, n3=2), 16, policy)
    assert policy.gain(2, 5 * 16) <= 0 < policy.gain(4, 4 * 16)
    assert prefix_pages.tolist() == [4]
    assert of_node.tolist() == [-1, 0, 0, 0]


def test_a_prefix_that_is_too_short_is_no_group():
    parent, depth = build((ROOT, 3))
    policy = HydragenPolicy(2, 49, 0, 0, 0)
    assert len(choose_groups(parent, depth, rows(n1=9), 16, policy).prefix_pages) == 0
    assert len(choose_groups(parent, depth, rows(n1=9), 17, policy).prefix_pages) == 1


def test_a_node_without_rows_has_the_group_of_later_sequences():
    parent, depth = build((ROOT, 5), (1, 2), (2, 2), (ROOT, 2))
    of_node, _ = choose_groups(parent, depth, rows(n1=3), 16, FREE)
    assert of_node.tolist() == [-1, 0, 0, 0, -1]


def test_sequences_that_share_nothing_are_in_no_group():
    for row_nodes in (rows(), rows(n0=50)):
        of_node, prefix_pages = choose_groups(*build(), row_nodes, 16, FREE)
        assert of_node.tolist() == [-1]
        assert len(prefix_pages) == 0
    of_node, prefix_pages = choose_groups(*build(*[(ROOT, 60)] * 100), np.arange(1, 101), 16, FREE)
    assert (of_node == -1).all()
    assert len(prefix_pages) == 0


@given(st.integers(1, 10_000), st.integers(1, 100_000), st.integers(0, 1_000), st.integers(0, 10_000), policies())
def test_more_rows_or_a_longer_prefix_never_make_a_group_stop_paying(size, prefix, more, longer, policy):
    if policy.gain(size, prefix) > 0:
        assert policy.gain(size + more, prefix) > 0
        assert policy.gain(size, prefix + longer) > 0


def test_groups_pay_together_for_their_attention_call():
    policy = HydragenPolicy()
    prompts = [(ROOT, 17)] * 8  # of 272 tokens
    parent, depth = build(*prompts)
    assert policy.gain(32, 17 * 16) > 0
    assert len(choose_groups(parent, depth, np.repeat([1], 32), 16, policy).prefix_pages) == 0
    assert len(choose_groups(parent, depth, np.repeat(np.arange(1, 9), 32), 16, policy).prefix_pages) == 8


@pytest.mark.parametrize("samples", [31, 32])
def test_the_default_policy_asks_for_32_rows(samples):
    parent, depth = build((ROOT, 400))
    of_node, _ = choose_groups(parent, depth, np.repeat([1], samples), 16, HydragenPolicy())
    assert (of_node[1] == 0) == (samples == 32)
