"""The radix tree finds what a list of all prefixes would find, and its pages are always accounted for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.core.memory.pages import PagePool
from services.scheduler.core.memory.prefix_tree import ROOT, PrefixTree

PAGE = 2
texts = st.lists(st.integers(1, 3), min_size=1, max_size=16).map(lambda tokens: np.array(tokens, np.uint32))


def whole_pages(tokens: np.ndarray) -> list[bytes]:
    return [tokens[: end * PAGE].tobytes() for end in range(1, len(tokens) // PAGE + 1)]


def run(tree: PrefixTree, pool: PagePool, tokens: np.ndarray, salt: str, step: int) -> int:
    """A sequence that computes ``tokens`` and hangs on what it leaves; returns its node."""
    most = len(tokens) // PAGE
    node, early = tree.match(tokens, salt, most, step)
    assert not early
    tree.attach(node)
    depth = int(tree.depth[node])
    if depth == most:
        return node
    pages = pool.take(most - depth)
    rest = tokens[depth * PAGE : most * PAGE]
    pool.tokens[pages] = rest.reshape(-1, PAGE)
    return tree.extend(node, rest[:PAGE], salt, pages, step)


def check(tree: PrefixTree, pool: PagePool) -> None:
    held = sum(int(tree.size[node]) for node in np.flatnonzero(tree.users[1 : tree.top]) + 1)
    assert pool.in_use == held
    assert pool.free + pool.in_use + pool.cached == pool.size


@given(st.lists(st.tuples(texts, st.sampled_from(["", "salt"]), st.booleans()), max_size=12), texts)
def test_a_match_is_the_longest_cached_run_of_pages(sequences, wanted):
    pool = PagePool(200, PAGE)
    tree = PrefixTree(pool)
    seen = {"": set(), "salt": set()}
    running = []
    for tokens, salt, stays in sequences:
        node = run(tree, pool, tokens, salt, step=1)
        seen[salt].update(whole_pages(tokens))
        path = tree.path(node)
        assert pool.tokens[path].reshape(-1).tolist() == tokens[: len(path) * PAGE].tolist()
        if stays:
            running.append((node, path.tolist()))
        else:
            tree.detach(node)
        check(tree, pool)
    for salt in ("", "salt"):
        node, _ = tree.match(wanted, salt, len(wanted) // PAGE, step=1)
        assert tree.depth[node] == sum(prefix in seen[salt] for prefix in whole_pages(wanted))
    for node, path in running:  # splits moved nobody
        assert tree.path(node).tolist() == path
        tree.detach(node)
    check(tree, pool)
    assert pool.in_use == 0


@given(st.lists(texts, min_size=1, max_size=12), st.integers(1, 40))
def test_cached_pages_can_all_be_taken_and_held_ones_never(sequences, wanted):
    pool = PagePool(40, PAGE)
    tree = PrefixTree(pool)
    kept = run(tree, pool, sequences[0], "", step=1)
    path = tree.path(kept).tolist()
    for tokens in sequences[1:]:
        if pool.available >= len(tokens) // PAGE:
            tree.detach(run(tree, pool, tokens, "", step=1))
    taken = pool.take(min(wanted, pool.available))
    assert not set(taken.tolist()) & set(path)
    assert tree.path(kept).tolist() == path
    assert pool.in_use == len(path) + len(taken)


def test_pages_being_computed_are_announced_and_not_given():
    pool = PagePool(10, PAGE)
    tree = PrefixTree(pool)
    tokens = np.array([1, 2, 3, 4], np.uint32)
    run(tree, pool, tokens, "", step=5)
    assert tree.match(tokens, "", 2, step=4) == (ROOT, True)
    assert tree.depth[tree.match(tokens, "", 2, step=5)[0]] == 2


def test_without_keep_pages_go_with_their_last_holder():
    pool = PagePool(10, PAGE)
    tree = PrefixTree(pool, keep=False)
    first = run(tree, pool, np.array([1, 2, 3, 4], np.uint32), "", step=1)
    second = run(tree, pool, np.array([1, 2, 5, 6], np.uint32), "", step=1)
    assert pool.in_use == 3
    tree.detach(first)
    assert pool.free == 8
    tree.detach(second)
    assert pool.free == 10


def test_a_node_that_lost_pages_leaves_its_hydragen_group():
    pool = PagePool(4, PAGE)
    tree = PrefixTree(pool)
    tokens = np.array([1, 2, 3, 4, 5, 6], np.uint32)
    node = run(tree, pool, tokens, "", step=1)
    tree.group[node] = 0
    tree.detach(node)
    pool.take(2)  # one free, one evicted
    found, _ = tree.match(tokens, "", 3, step=1)
    assert (tree.depth[found], tree.group[found]) == (2, -1)
