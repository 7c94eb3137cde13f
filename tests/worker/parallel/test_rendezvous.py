"""Workers that come, that do not come, and that were started otherwise."""

import socket
import threading

import pytest

from bench.server import free_port
from services.common.errors import InvalidRequest
from services.worker.described.ranks import Ranks
from services.worker.parallel import rendezvous
from services.worker.parallel.errors import ParallelError


def attempt(ranks: list[Ranks], port: int, timeout_s: float = 15.0, settings=(), stores=None) -> list[str]:
    """Return the outcome of each of these workers: ``met``, or its error. ``settings`` has those of each.

    ``stores`` gets their stores; None = they close at the end. Other workers lose the connection then.
    """
    outcomes = [""] * len(ranks)
    settings = list(settings) or [{"page_size": 16}] * len(ranks)
    stores = [] if stores is None else stores

    def come(index: int) -> None:
        try:
            stores.append(rendezvous.meet(ranks[index], "127.0.0.1", port, settings[index], timeout_s))
            outcomes[index] = "met"
        except (InvalidRequest, ParallelError) as error:
            outcomes[index] = f"{type(error).__name__}: {error}"

    threads = [threading.Thread(target=come, args=(index,)) for index in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def grid(tp_size: int, pp_size: int) -> list[Ranks]:
    return [Ranks(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]


def test_workers_meet_in_any_order():
    assert attempt(grid(2, 2)[::-1], free_port()) == ["met"] * 4


@pytest.mark.parametrize(
    ("mine", "first", "message"),
    [
        ({"page_size": 32}, {"page_size": 16}, "flag page_size=32: the first worker of this replica has page_size=16"),
        ({"use_cudagraphs": True}, {"use_cudagraphs": False}, "flag use_cudagraphs=T: .* has use_cudagraphs=F"),
        ({"pp_layers": [1, 2]}, {"pp_layers": []}, "flag pp_layers=1,2: "),
    ],
)
def test_workers_that_were_started_with_other_flags_are_refused(mine, first, message):
    outcomes = attempt(grid(2, 1), free_port(), settings=[first, mine])
    assert outcomes[1].startswith("InvalidRequest: flag")
    with pytest.raises(InvalidRequest, match=message):
        raise InvalidRequest(outcomes[1].partition(": ")[2])
    assert outcomes[1].endswith("; start all with the same flags but for their ranks")
    assert outcomes[0].startswith("ParallelError: the replica cannot start; rank tp_rank=1 pp_rank=0: flag")


def test_workers_that_have_other_kernels_are_refused():
    outcomes = attempt(grid(2, 1), free_port(), settings=[{"flashinfer": True}, {"flashinfer": False}])
    reason = "flashinfer=F: the first worker of this replica has flashinfer=T; install the same packages for all"
    assert outcomes[1] == f"InvalidRequest: {reason}"


def test_workers_that_have_other_files_of_the_model_are_refused():
    outcomes = attempt(grid(2, 1), free_port(), settings=[{"model": "m", "model_files": each} for each in ("ab", "cd")])
    reason = (
        "flag model=m: its files here are not those of the first worker of this replica (fingerprint cd instead of ab):"
        " config.json or the weights differ; give all hosts the same revision of the model"
    )
    assert outcomes == [
        f"ParallelError: the replica cannot start; rank tp_rank=1 pp_rank=0: {reason}",
        f"InvalidRequest: {reason}",
    ]


def test_a_rank_that_is_given_twice_is_refused_if_it_stays_so(monkeypatch):
    monkeypatch.setattr(rendezvous, "_TAKEN_S", 0.3)
    port = free_port()
    outcomes = attempt([*grid(2, 1), Ranks(1, 2)], port)
    assert outcomes[0] == "met"
    refused = (
        f"InvalidRequest: flags tp_rank=1 pp_rank=0: another worker at 127.0.0.1:{port} is this rank already; give"
    )
    assert sorted(each.startswith(refused) for each in outcomes[1:]) == [False, True]


def test_a_worker_that_comes_back_waits_for_the_replica_before_to_end():
    """Its first worker notices a little later."""
    port, first, second = free_port(), *grid(2, 1)
    before = rendezvous.keep_store("127.0.0.1", port, 10.0)
    before.add(f"taken/{second.index}", 1)
    outcomes = []
    waiting = threading.Thread(target=lambda: outcomes.extend(attempt([second], port)))
    waiting.start()
    while int(before.add(f"taken/{second.index}", 0)) < 2:  # it has tried
        pass
    del before
    stores = []
    assert attempt([first], port, stores=stores) == ["met"]
    waiting.join()
    assert outcomes == ["met"]


def test_a_rank_that_does_not_come_is_named():
    port, ranks = free_port(), grid(2, 2)
    outcomes = attempt([ranks[0], ranks[2]], port, timeout_s=1.0)
    missing = (
        f"rank tp_rank=1 pp_rank=0, rank tp_rank=1 pp_rank=1 did not connect to 127.0.0.1:{port}: start every rank"
    )
    assert missing in outcomes[0]


def test_nobody_to_meet_is_said():
    (outcome,) = attempt([Ranks(1, 2)], port := free_port(), timeout_s=0.3)
    assert outcome.startswith(
        f"ParallelError: no worker listens at master_addr=127.0.0.1 master_port={port}: start rank tp_"
    )


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (outcome,) = attempt([Ranks(0, 2)], port)
    assert outcome.startswith(
        f"InvalidRequest: flag master_port={port}: cannot listen there (Address already in use); ch"
    )


def test_on_loopback_nobody_else_can_come():
    store = rendezvous.keep_store("127.0.0.1", port := free_port(), 5.0)
    with open("/proc/net/tcp") as table:
        listening = [line.split()[1] for line in table if line.split()[3] == "0A"]
    assert f"0100007F:{port:04X}" in listening
    assert f"00000000:{port:04X}" not in listening
    del store
