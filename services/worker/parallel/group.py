"""The connections of one worker to the others of its replica."""

import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from services.common.boundaries import undo_on_error
from services.worker.described.ranks import Ranks
from services.worker.parallel import operators, overlap, peer_memory
from services.worker.parallel.agreement import Agreement
from services.worker.parallel.channel import Receiver, Sender
from services.worker.parallel.errors import ParallelError, lost_peer
from services.worker.parallel.exchange import TENSOR_RANKS
from services.worker.parallel.rendezvous import meet
from services.worker.parallel.watch import PeerWatch

# Timeout of the start: workers start one after the other, and load models at different speeds.
START_S = 1800.0
# Timeout of a collective: longer than any step or compilation takes.
STEP_S = 300.0
# Limit of activations in transit to the next stage: a stage runs ahead of the next one by at most these micro-batches.
MOST_SENDS = 8
# Limit of messages with tokens in transit to the first stage, which receives those of a step only when the next step
# needs them. More than a step has micro-batches.
_MOST_TOKENS = 256
_SETTINGS = {
    # NVLink's multicast is not needed, and some hosts lack it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Each rank sees only its own device, so different devices have the same index.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # With memory that grows, replays hang if the buffers of a captured graph are registered.
    "NCCL_GRAPH_REGISTER": "0",
    # A receive occupies one multiprocessor of the device for each channel until the data arrives. Four are fast enough.
    "NCCL_MAX_P2P_NCHANNELS": "4",
    # Connections take memory and wait for each other, so they are made at the start and not in a step.
    "NCCL_RUNTIME_CONNECT": "0",
    # A channel sends in one direction only, so serialised sends are harmless.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


class RankGroup:
    """The connections of this rank. Made and used by the compute thread. A process has one at a time.

    ``incarnation_id`` is the same on all ranks, and new after each start. ``agreement`` compares the plans of the
    ranks. ``shares_memory``: on CUDA, in every stage, the ranks can read each other's memory.

    ``from_previous`` and ``to_next`` carry activations between stages; ``tokens_out`` and ``tokens_in`` carry sampled
    tokens from the last stage to the first. They connect ranks with the same ``tp_rank``, and are None on a rank
    without such a connection. Each is a process group of two ranks, because sends of a larger group may block each
    other.
    """

    def __init__(
        self,
        ranks: Ranks,
        address: str,
        port: int,
        device: torch.device,
        settings: Mapping[str, object],
        *,
        start_s: float = START_S,
        step_s: float = STEP_S,
    ) -> None:
        """Wait until all ranks have connected to ``address:port``. ``settings``: flags that must be equal on all ranks.

        Raises ``InvalidRequest`` if the flags contradict each other, and ``ParallelError`` if a rank does not connect.
        """
        self.ranks = ranks
        self._store = meet(ranks, address, port, settings, start_s)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        for name, value in _SETTINGS.items():  # read when the first group is made
            os.environ.setdefault(name, value)
        self._step_timeout = timedelta(seconds=step_s)
        with lost_peer("a worker"):
            # Small messages and long waits use the host's network, where a broken connection shows at once.
            dist.init_process_group(
                "gloo", store=self._store, rank=ranks.index, world_size=ranks.size, timeout=timedelta(seconds=start_s)
            )
            with undo_on_error(self._leave):
                self._connect(device)
                # All stages choose the same strategies, since the steps of the rehearsal depend on them.
                self.shares_memory: bool = bool(self.least(self.shares_memory))
                names = [ranks.name(index) for index in range(ranks.size)]
                self._watch = PeerWatch(dist.new_group(backend="gloo"), ranks.index, names)
                # A call that waits blocks the other users of the same store object.
                store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs do not have it
                self.agreement = Agreement(store, ranks, self._watch)
                self.incarnation_id = self._same_for_all("incarnation_id", uuid.uuid4().hex)

    def _connect(self, device: torch.device) -> None:
        """Make all groups. Every rank makes every group in the same order, by which torch identifies them."""
        self.shares_memory, self._stage = False, ""
        ranks, tp_ranks = self.ranks, range(self.ranks.tp_size)
        for pp_rank in range(ranks.pp_size if ranks.tp_size > 1 else 0):
            stage = self._group([ranks.at(tp_rank, pp_rank) for tp_rank in tp_ranks], device)
            if pp_rank == ranks.pp_rank:
                operators.register(TENSOR_RANKS, stage)
                operators.connect(stage, device)
                self._stage, one_host = stage.group_name, device.type == "cuda" and self._share_a_host(pp_rank)
                self.shares_memory = one_host and peer_memory.join(stage, device)
        self.to_next = self.from_previous = self.tokens_out = self.tokens_in = None
        for pp_rank in range(ranks.pp_size - 1):
            for tp_rank in tp_ranks:
                ends = ranks.at(tp_rank, pp_rank), ranks.at(tp_rank, pp_rank + 1)
                sender, receiver = self._channel(*ends, device, MOST_SENDS)
                self.to_next, self.from_previous = sender or self.to_next, receiver or self.from_previous
        for tp_rank in tp_ranks if ranks.pp_size > 1 else ():
            ends = ranks.at(tp_rank, ranks.pp_size - 1), ranks.at(tp_rank, 0)
            sender, receiver = self._channel(*ends, device, _MOST_TOKENS)
            self.tokens_out, self.tokens_in = sender or self.tokens_out, receiver or self.tokens_in

    def _channel(
        self, source: int, target: int, device: torch.device, limit: int
    ) -> tuple[Sender | None, Receiver | None]:
        """Connect ``source`` to ``target``, with at most ``limit`` tensors in transit. Return this rank's end."""
        pair = sorted((source, target))
        group, ranks = self._group(pair, device), self.ranks
        sender = receiver = None
        if ranks.index == source:
            sender = Sender(group, pair.index(target), ranks.name(target), limit)
            sender.connect(device)
        if ranks.index == target:
            receiver = Receiver(group, pair.index(source), ranks.name(source), device)
            receiver.connect()
        return sender, receiver

    def _same_for_all(self, name: str, value: str) -> str:
        """Return the ``value`` of the first rank."""
        if self.ranks.index == 0:
            self._store.set(name, value)
        found: str = self._store.get(name).decode()
        return found

    def _group(self, members: list[int], device: torch.device) -> dist.ProcessGroup:
        device_id = device if self._backend == "nccl" else None
        timeout = self._step_timeout
        group: dist.ProcessGroup = dist.new_group(members, backend=self._backend, timeout=timeout, device_id=device_id)
        return group

    def _share_a_host(self, pp_rank: int) -> bool:
        """Return whether the ranks of this stage see each other's processes, which sharing memory requires.

        The result is the same on all ranks of the stage.
        """
        here = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
        self._store.set(f"host/{self.ranks.index}", here)
        stage = [self.ranks.at(tp_rank, pp_rank) for tp_rank in range(self.ranks.tp_size)]
        return len({self._store.get(f"host/{index}") for index in stage}) == 1

    def wait_for_all(self) -> None:
        """Wait until every rank has made this call. Raises ``ParallelError`` as soon as a rank is lost."""
        with lost_peer("a worker"):
            dist.barrier()

    def least(self, value: int) -> int:
        """Return the smallest ``value`` of all ranks."""
        smallest = torch.tensor(value)
        with lost_peer("a worker"):
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def union(self, values: Iterable[int]) -> list[int]:
        """Return the ``values`` of all ranks, ascending and each once."""
        found: list[list[int]] = [[]] * self.ranks.size
        with lost_peer("a worker"):
            dist.all_gather_object(found, list(values))
        return sorted({value for each in found for value in each})

    def drain(self) -> None:
        """Wait until all tensors that this rank sent are received. All ranks must have run the same steps."""
        for end in (self.to_next, self.tokens_out):
            if end is not None:
                end.drain()

    def watch(self, on_lost: Callable[[ParallelError], None]) -> None:
        """Call ``on_lost`` once, in any thread, as soon as the replica cannot continue, even if no step runs.

        The reasons are a rank that has left or exited, and ranks with different plans. Any thread may call this.
        """
        self._watch.notify(on_lost)

    def cause(self, error: BaseException) -> ParallelError:
        """Return the cause of a step that failed here with ``error``, and send it to the other ranks."""
        if not isinstance(error, ParallelError):
            error = ParallelError(f"a step failed on {self.ranks.name()}: {error}")
        return self._watch.cause(error)

    def close(self) -> None:
        """Notify the other ranks, which cannot run further steps, and close the connections."""
        self._watch.close()
        self._leave()

    def _leave(self) -> None:
        operators.unregister(TENSOR_RANKS)
        overlap.release(TENSOR_RANKS)
        peer_memory.release(self._stage)
        dist.destroy_process_group()
