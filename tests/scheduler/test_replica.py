"""What the workers of a replica say of themselves, put together."""

from dataclasses import asdict

import pytest

from services.scheduler.workers.replica import Unready, is_reporter, merge_infos
from tests.fakes.model import FakeShape
from tokasaurus.worker.v1 import worker_pb2

RANKS = {"a:1": (1, 1), "b:2": (0, 0), "c:3": (0, 1), "d:4": (1, 0)}  # (tp_rank, pp_rank), in no order
REPORTER = "c:3"


def replica(address: str = "", **other) -> dict[str, worker_pb2.WorkerInfo]:
    """Four workers; the one at ``address`` says something else of itself."""
    infos = {}
    for each, (tp_rank, pp_rank) in RANKS.items():
        shape = asdict(FakeShape(tp_rank=tp_rank, tp_size=2, pp_rank=pp_rank, pp_size=2))
        differs = other if each == address else {}
        infos[each] = FakeShape(**shape | {name: differs[name] for name in differs if name in shape}).worker_info("x")
        for name in differs.keys() - shape.keys():
            setattr(infos[each], name, differs[name])
    return infos


def test_one_rank_reports_wherever_it_is_named():
    assert [address for address, info in replica().items() if is_reporter(info)] == [REPORTER]


def test_a_worker_alone_is_as_it_says():
    info = FakeShape().worker_info("x")
    assert merge_infos({"a:1": info}) == info


def test_limits_suit_every_rank_and_the_rest_is_the_reporter_s():
    infos = replica("b:2", page_count=900, hydragen=False, max_plans_in_flight=5, max_micro_batches=3, device="other")
    infos["d:4"].page_count = 800
    one = merge_infos(infos)
    assert (one.page_count, one.max_plans_in_flight, one.max_micro_batches, one.hydragen) == (800, 5, 3, False)
    one.page_count, one.max_plans_in_flight, one.max_micro_batches, one.hydragen = 1024, 64, 8, True
    assert one == infos[REPORTER]
    assert infos[REPORTER].page_count == 1024


@pytest.mark.parametrize("address", RANKS)
def test_ranks_of_two_starts_are_not_ready(address):
    with pytest.raises(Unready, match="and worker c:3 belong to different starts") as unready:
        merge_infos(replica(address, incarnation_id="y"))
    assert address in str(unready.value) or address == REPORTER


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"page_size": 32}, r"page_size=16 \(.*\) and page_size=32 \(b:2\): start all of them with the same flags"),
        ({"model": "else"}, "model='fake' .* and model='else'"),
        ({"vocab_size": 7}, "vocab_size=7"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16'"),
        ({"contract_version": "9"}, "contract_version='9'"),
        ({"data_parallel_rank": 1}, "data_parallel_rank=1"),
        ({"tp_size": 4}, r"tp_size=2 pp_size=2 \(.*\) and tp_size=4 pp_size=2 \(b:2\): .* the same sizes"),
        ({"tp_rank": 1}, r"tp_rank=1 pp_rank=0 \(b:2\).*: start one for each rank of tp_size=2 pp_size=2"),
        ({"tp_rank": 2}, "start one for each rank"),
    ],
)
def test_workers_that_are_no_replica_are_told_apart(other, reason):
    with pytest.raises(ValueError, match=reason):
        merge_infos(replica("b:2", **other))


def test_a_rank_that_is_not_named_is_missed_and_a_stranger_is_noticed():
    infos = replica()
    del infos["a:1"]
    with pytest.raises(
        ValueError, match=r"flag worker_addresses=b:2,c:3,d:4: 3 named, expected 4, each .* of tp_size=2 pp_size=2"
    ):
        merge_infos(infos)
    alone = FakeShape().worker_info("x")
    with pytest.raises(
        ValueError, match=r"flag worker_addresses=a:1,b:2: 2 named, expected 1, each .* of tp_size=1 pp_size=1"
    ):
        merge_infos({"a:1": alone, "b:2": alone})


def test_flags_are_named_before_a_restart_is_waited_for():
    """It would be waited for in vain."""
    with pytest.raises(ValueError, match="start one for each rank"):
        merge_infos(replica("b:2", tp_rank=1, incarnation_id="y"))
    with pytest.raises(ValueError, match="data_parallel_rank=1"):
        merge_infos(replica("b:2", data_parallel_rank=1, incarnation_id="y"))
