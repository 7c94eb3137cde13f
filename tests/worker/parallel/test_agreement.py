"""Streams that end on several ranks, with a store of one process."""

import threading

import pytest
import torch.distributed as dist

from services.worker.described.ranks import Ranks
from services.worker.parallel import agreement as module
from services.worker.parallel.agreement import Agreement
from services.worker.parallel.errors import ParallelError

RANKS = [Ranks(0, 2), Ranks(1, 2)]
AGAIN = "; start all workers of this replica again"


class Watch:
    """Keeps what a rank ends with."""

    lost = False

    def __init__(self) -> None:
        self.errors: list[str] = []

    def fail(self, error: ParallelError) -> None:
        self.errors.append(error.message)


def settle(*ends: tuple[int, bool] | None, store: dist.Store | None = None) -> list[list[str]]:
    """What each rank ends with when a stream has ended on each after ``(plans, refused)``; None = it has not."""
    store, watches = store or dist.HashStore(), [Watch() for _ in ends]
    for ranks, watch, end in zip(RANKS, watches, ends, strict=True):
        if end is not None:
            Agreement(store, ranks, watch).settle("stream", end[0], refused=end[1])
    for thread in threading.enumerate():
        if thread.name == "agreement":
            thread.join()
    return [watch.errors for watch in watches]


@pytest.mark.parametrize(
    "ends",
    [
        ((3, False), (3, False)),
        ((0, False), (0, False)),
        ((2, True), (2, True)),
        ((2, True), (5, False)),  # which refuses the third too, when it comes to it
        ((0, True), (2, False)),
        ((2, True), (2, False)),  # which has not received the third
    ],
)
def test_ranks_that_run_the_same_plans_go_on(ends):
    assert settle(*ends) == settle(*reversed(ends)) == [[], []]


@pytest.mark.parametrize("refused", [False, True])
def test_ranks_that_have_received_different_plans_end(refused):
    told = (
        "a stream of plans has ended with different numbers of them (3 on rank tp_rank=0 pp_rank=0, 2 on rank tp_rank=1"
        " pp_rank=0); start all workers of this replica again"
    )
    assert settle((3, refused), (2, False)) == [[told], [told]]


def test_a_rank_without_plans_does_not_wait():
    told = "ended with different numbers of them (1 on rank tp_rank=0 pp_rank=0, 0 on rank tp_rank=1 pp_rank=0)"
    (first,), second = settle((1, False), (0, False))
    assert told in first
    assert second == []
    assert settle(None, (0, False)) == [[], []]


def test_a_stream_that_does_not_end_everywhere_is_the_end(monkeypatch):
    monkeypatch.setattr(module, "_TIMEOUT_S", 0.05)
    told = "a stream of plans has ended, but not on rank tp_rank=1 pp_rank=0, within 0.05 s" + AGAIN
    assert settle((1, False), None) == [[told], []]


def test_a_store_that_is_gone_means_that_who_kept_it_is():
    class Gone(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("broken pipe")

    lost = "rank tp_rank=0 pp_rank=0 of this replica is lost (broken pipe); start all of its workers again"
    assert settle(None, (1, False), store=Gone()) == [[], [lost]]


@pytest.mark.parametrize("ends", [((3, False), (3, False)), ((0, False), (0, False)), ((0, True), (2, False))])
def test_nothing_of_a_stream_is_left_once_all_ranks_know_how_it_ended(ends):
    store = dist.HashStore()
    assert settle(*ends, store=store) == [[], []]
    assert store.num_keys() == 0


def test_what_a_rank_has_yet_to_read_of_a_stream_is_left():
    store = dist.HashStore()
    settle(None, (0, False), store=store)
    assert store.check(["plans/stream/1"])
    assert settle((0, False), None, store=store) == [[], []]
    assert store.num_keys() == 0


def test_streams_are_told_apart():
    store, watch = dist.HashStore(), Watch()
    first, second = (Agreement(store, ranks, watch) for ranks in RANKS)
    for stream, plans in (("a", 1), ("b", 2)):
        first.settle(stream, plans)
    for stream, plans in (("b", 2), ("a", 1)):
        second.settle(stream, plans)
    for thread in threading.enumerate():
        if thread.name == "agreement":
            thread.join()
    assert watch.errors == []
