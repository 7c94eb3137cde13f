"""Entry point of ``toka-workers flag=value ...``, which runs all ranks of a replica on this host.

Each rank is a ``toka-worker`` process with its own GPU. In a container, ranks of one program can exchange data over
NVLink and shared memory. If one rank exits, the program ends all others and exits too, so that its supervisor restarts
the replica.
"""

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence

import structlog

from services.common.config import WorkerConfig
from services.common.errors import PEER_LOST_STATUS, InvalidRequest, Unavailable
from services.common.flags import without_flags
from services.common.host.private_files import usual_umask
from services.common.host.resources import usable_processors
from services.common.process.children import module_command, module_environment
from services.common.process.service import PARENT_PID, Stop, run_service

PEER_GRACE_S = 5.0  # time for the other ranks to detect that a rank has exited
EXIT_TIMEOUT_S = 3.0  # time for ranks to exit after their drain
_OWN_FLAGS = ("worker_listen", "metrics_port", "tp_rank", "pp_rank")  # flags that differ from rank to rank

log = structlog.get_logger(__name__)


def main() -> None:
    """Run the ranks until this program is stopped or a rank exits."""
    run_service("workers", WorkerConfig, _serve)


def rank_flags(config: WorkerConfig, arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield the flags of each rank, in the order of their GPUs, one stage after the other.

    ``arguments`` are those of this program. Each rank gets all of them except ``_OWN_FLAGS``. Ports count up from those
    of ``config``.
    """
    host, _, port = config.worker_listen.rpartition(":")
    if config.tp_rank or config.pp_rank or not port.isdecimal():
        raise InvalidRequest(
            "flags tp_rank, pp_rank and worker_listen: toka-workers numbers its ranks and counts up from the port of"
            f" worker_listen={config.worker_listen}; leave the ranks out, and name host:port"
        )
    shared = without_flags(WorkerConfig, arguments, _OWN_FLAGS)
    ranks = itertools.product(range(config.pp_size), range(config.tp_size))
    for index, (pp_rank, tp_rank) in enumerate(ranks):
        flags = [*shared, f"tp_rank={tp_rank}", f"pp_rank={pp_rank}", f"worker_listen={host}:{int(port) + index}"]
        if config.metrics_port:
            flags.append(f"metrics_port={config.metrics_port + index}")
        yield flags


def rank_environments(config: WorkerConfig, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield the environment of each rank, in which it sees one GPU, and on a CPU uses its share of the cores."""
    count = config.tp_size * config.pp_size
    visible = environment.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count))))
    gpus = [name for name in visible.split(",") if name not in ("", "-1")]
    if config.device == "cuda" and len(gpus) < count:
        raise InvalidRequest(
            f"flags tp_size={config.tp_size} pp_size={config.pp_size}: {count} ranks need a GPU each, and"
            f" CUDA_VISIBLE_DEVICES={visible} shows {len(gpus)}; lower them, or show more"
        )
    shared = environment | {PARENT_PID: str(os.getpid())}
    if config.torch_num_threads is None and config.device != "cuda":
        shared["TOKA_TORCH_NUM_THREADS"] = str(max(1, usable_processors() // count))
    for index in range(count):
        yield shared | ({"CUDA_VISIBLE_DEVICES": gpus[index]} if index < len(gpus) else {})


async def _serve(config: WorkerConfig, stop: Stop) -> None:
    """Run the ranks.

    Raises ``Unavailable`` with the exit status of the first rank that exited, if that is not 0.
    """
    flags, environments = rank_flags(config, sys.argv[1:]), rank_environments(config, module_environment(os.environ))
    starts = [
        asyncio.create_subprocess_exec(*module_command("services.worker", *own), env=environment, umask=usual_umask())
        for own, environment in list(zip(flags, environments, strict=True))
    ]
    ranks = await asyncio.gather(*starts)
    ends = [asyncio.create_task(rank.wait()) for rank in ranks]
    stopped = asyncio.create_task(stop.wait())
    try:
        ended, _ = await asyncio.wait([*ends, stopped], return_when=asyncio.FIRST_COMPLETED)
        if stopped not in ended:
            ended, _ = await asyncio.wait(ends, timeout=PEER_GRACE_S)
            _judge([(index, end.result()) for index, end in enumerate(ends) if end in ended])
    finally:
        stopped.cancel()
        await _end(ranks, ends, stop, config.drain_seconds)


def _judge(ended: list[tuple[int, int]]) -> None:
    """Raise ``Unavailable`` if the rank that exited first failed. ``ended``: index and status of each exited rank.

    A rank whose status reports a lost peer was not the first.
    """
    index, status = next((each for each in ended if each[1] != PEER_LOST_STATUS), ended[0])
    if status:
        error = Unavailable(f"rank {index} ended with status {status}, and the others with it")
        error.exit_status = status if status > 0 else 128 - status
        raise error
    log.info("a rank was stopped, and the others with it", rank=index)


async def _end(
    ranks: list[asyncio.subprocess.Process], ends: list[asyncio.Task[int]], stop: Stop, drain_s: float
) -> None:
    """Terminate all ranks, and kill those that have not exited after their drain."""
    for number in ("terminate", "kill"):
        for rank in ranks:
            if rank.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    getattr(rank, number)()
        timeout_s = 0.0 if stop.at_once.is_set() else drain_s + EXIT_TIMEOUT_S
        if number == "kill" or await stop.within(timeout_s, lambda: asyncio.wait(ends)):
            break
    await asyncio.wait(ends)


if __name__ == "__main__":
    main()
