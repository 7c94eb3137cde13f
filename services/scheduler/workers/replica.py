"""Checks and merges what the workers of a replica report about themselves."""

from collections.abc import Mapping
from itertools import product

from tokasaurus.worker.v1 import worker_pb2

_EQUAL = ("model", "contract_version", "page_size", "vocab_size", "dtype", "data_parallel_rank", "window_tokens")
_LEAST = (
    "page_count",
    "max_slots",
    "max_tokens_per_step",
    "max_context_tokens",
    "max_top_logprobs",
    "max_plans_in_flight",
    "hydragen",
    "max_micro_batches",
    "prompt_logprobs",
    "processed_logprobs",
    "thinking_budgets",
    "sleeps",
)


class Unready(Exception):
    """The workers cannot be used yet. The message names a worker and the reason."""


def is_reporter(info: worker_pb2.WorkerInfo) -> bool:
    """Return whether this rank returns the tokens."""
    stage = info.pipeline_parallel
    return stage.rank == stage.size - 1 and info.tensor_parallel.rank == 0


def merge_infos(infos: Mapping[str, worker_pb2.WorkerInfo]) -> worker_pb2.WorkerInfo:
    """Return the info of the reporting rank, with limits that hold for every rank. ``infos`` are by address.

    Raises ``ValueError`` if these workers cannot be one replica, and ``Unready`` while they belong to different starts.
    """
    _check_ranks(infos)
    reporter = next(address for address, info in infos.items() if is_reporter(info))
    one = worker_pb2.WorkerInfo()
    one.CopyFrom(infos[reporter])
    for name in _EQUAL:
        found = {getattr(info, name): address for address, info in infos.items()}
        if len(found) > 1:
            values = " and ".join(f"{name}={value!r} ({address})" for value, address in found.items())
            raise ValueError(f"the workers of one replica have {values}: start all of them with the same flags")
    for address, info in infos.items():
        if info.incarnation_id != one.incarnation_id:
            raise Unready(
                f"worker {address} and worker {reporter} belong to different starts; one of them must restart"
            )
    for name in _LEAST:
        setattr(one, name, min(getattr(info, name) for info in infos.values()))
    return one


def _check_ranks(infos: Mapping[str, worker_pb2.WorkerInfo]) -> None:
    """Check that every rank of the grid exists exactly once."""
    sizes = {(info.tensor_parallel.size, info.pipeline_parallel.size): address for address, info in infos.items()}
    grids = " and ".join(f"tp_size={tp_size} pp_size={pp_size} ({at})" for (tp_size, pp_size), at in sizes.items())
    if len(sizes) > 1:
        raise ValueError(f"the workers of one replica have {grids}: start all of them with the same sizes")
    ((tp_size, pp_size),) = sizes
    if tp_size * pp_size != len(infos):
        raise ValueError(
            f"flag worker_addresses={','.join(infos)}: {len(infos)} named, expected {tp_size * pp_size}, each worker of"
            f" a replica of {grids} once"
        )
    ranks = {at: (info.tensor_parallel.rank, info.pipeline_parallel.rank) for at, info in infos.items()}
    if sorted(ranks.values()) != list(product(range(tp_size), range(pp_size))):
        found = ", ".join(f"tp_rank={tp_rank} pp_rank={pp_rank} ({at})" for at, (tp_rank, pp_rank) in ranks.items())
        raise ValueError(
            f"the workers have the ranks {found}: start one for each rank of tp_size={tp_size} pp_size={pp_size}"
        )
