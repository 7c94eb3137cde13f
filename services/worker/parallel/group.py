"""The connections of one worker to the others of its replica."""

import os
import uuid
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from services.worker.described.ranks import Ranks
from services.worker.parallel import operators, overlap, peer_memory
from services.worker.parallel.agreement import Agreement
from services.worker.parallel.channel import Receiver, Sender
from services.worker.parallel.errors import ParallelError, lost_peer
from services.worker.parallel.exchange import TENSOR_RANKS
from services.worker.parallel.rendezvous import meet
from services.worker.parallel.watch import PeerWatch

# Workers are started one after the other, and models are loaded at different speeds.
START_S = 1800.0
# A worker that is there but does not answer: longer than any step, or compiling, takes.
STEP_S = 300.0
# Activations on their way to the next stage, at most: a stage runs ahead of the next by no more micro-batches.
MOST_SENDS = 8
# Tokens on their way to the first stage, which takes those of a step when the next step needs them, and there may be
# none: as many as no step has micro-batches.
_MOST_TOKENS = 256
_SETTINGS = {
    # NVLink's multicast is not needed, and not every host has it.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # Each rank sees one device, its own, so that all are the first: they are no less different.
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    # Buffers that are registered when a graph is captured must not be of memory that grows: replays hang.
    "NCCL_GRAPH_REGISTER": "0",
    # Receiving keeps as many processors of the device busy as there are channels, until it comes. Few are fast enough.
    "NCCL_MAX_P2P_NCHANNELS": "4",
    # Connections take memory and wait for each other: they are made here, and not in some step.
    "NCCL_RUNTIME_CONNECT": "0",
    # A channel sends in one direction only, so there is nothing that its sends could hold up.
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}


class RankGroup:
    """Made by the compute thread, which uses all of it. A process has one at a time.

    ``incarnation_id`` is the same on all ranks, and new whenever they are started again. ``agreement`` settles whether
    all were given the same plans. ``shares_memory``: ranks of a stage can read each other's, in every stage; on CUDA.

    The parts that a rank does not have are None: ``from_previous`` and ``to_next`` carry activations between stages,
    ``tokens_out`` and ``tokens_in`` what was sampled from the last stage to the first; all of them between ranks with
    the same ``tp_rank``. Each is a group of two: in a larger one, sends may wait for each other.
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
        """Waits until all ranks have come to ``address:port``. ``settings``: flags that must be the same everywhere.

        Raises ``InvalidRequest`` for flags that do not fit together, and ``ParallelError`` for ranks that do not come.
        """
        self.ranks = ranks
        self._store = meet(ranks, address, port, settings, start_s)
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        for name, value in _SETTINGS.items():  # read when the first group is made
            os.environ.setdefault(name, value)
        self._step = timedelta(seconds=step_s)
        with lost_peer("a worker"):
            # Over the host's network: small messages, and waits for what takes long. Its end shows at once.
            dist.init_process_group(
                "gloo", store=self._store, rank=ranks.index, world_size=ranks.size, timeout=timedelta(seconds=start_s)
            )
            try:
                self._connect(device)
                # All stages go the same ways: what they rehearse depends on it.
                self.shares_memory: bool = bool(self.least(self.shares_memory))
                names = [ranks.name(index) for index in range(ranks.size)]
                self._watch = PeerWatch(dist.new_group(backend="gloo"), ranks.index, names)
                # A store holds up others while it waits.
                store = self._store.clone()  # type: ignore[attr-defined]  # torch's stubs do not have it
                self.agreement = Agreement(store, ranks, self._watch)
                self.incarnation_id = self._same_for_all("incarnation_id", uuid.uuid4().hex)
            except BaseException:
                self._leave()
                raise

    def _connect(self, device: torch.device) -> None:
        """Every rank makes every group, in the same order: that is how they are told apart."""
        self.shares_memory, self._stage = False, ""
        ranks, everyone = self.ranks, range(self.ranks.tp_size)
        for pp_rank in range(ranks.pp_size if ranks.tp_size > 1 else 0):
            stage = self._group([ranks.at(tp_rank, pp_rank) for tp_rank in everyone], device)
            if pp_rank == ranks.pp_rank:
                operators.register(TENSOR_RANKS, stage)
                operators.connect(stage, device)
                self._stage, near = stage.group_name, device.type == "cuda" and self._share_a_host(pp_rank)
                self.shares_memory = near and peer_memory.join(stage, device)
        self.to_next = self.from_previous = self.tokens_out = self.tokens_in = None
        for pp_rank in range(ranks.pp_size - 1):
            for tp_rank in everyone:
                ends = ranks.at(tp_rank, pp_rank), ranks.at(tp_rank, pp_rank + 1)
                sender, receiver = self._channel(*ends, device, MOST_SENDS)
                self.to_next, self.from_previous = sender or self.to_next, receiver or self.from_previous
        for tp_rank in everyone if ranks.pp_size > 1 else ():
            ends = ranks.at(tp_rank, ranks.pp_size - 1), ranks.at(tp_rank, 0)
            sender, receiver = self._channel(*ends, device, _MOST_TOKENS)
            self.tokens_out, self.tokens_in = sender or self.tokens_out, receiver or self.tokens_in

    def _channel(
        self, source: int, target: int, device: torch.device, most: int
    ) -> tuple[Sender | None, Receiver | None]:
        """One end of the way from ``source`` to ``target``, of whichever this rank is one; ``most`` at once."""
        pair = sorted((source, target))
        group, ranks = self._group(pair, device), self.ranks
        sender = receiver = None
        if ranks.index == source:
            sender = Sender(group, pair.index(target), ranks.name(target), most)
            sender.connect(device)
        if ranks.index == target:
            receiver = Receiver(group, pair.index(source), ranks.name(source), device)
            receiver.connect()
        return sender, receiver

    def _same_for_all(self, name: str, value: str) -> str:
        """The first rank's ``value``."""
        if self.ranks.index == 0:
            self._store.set(name, value)
        found: str = self._store.get(name).decode()
        return found

    def _group(self, members: list[int], device: torch.device) -> dist.ProcessGroup:
        device_id = device if self._backend == "nccl" else None
        group: dist.ProcessGroup = dist.new_group(
            members, backend=self._backend, timeout=self._step, device_id=device_id
        )
        return group

    def _share_a_host(self, pp_rank: int) -> bool:
        """Whether the ranks of this stage see each other's processes, which is how they are given each other's memory;
        the same answer on all of them."""
        here = f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
        self._store.set(f"host/{self.ranks.index}", here)
        stage = [self.ranks.at(tp_rank, pp_rank) for tp_rank in range(self.ranks.tp_size)]
        return len({self._store.get(f"host/{index}") for index in stage}) == 1

    def wait_for_all(self) -> None:
        """Until every rank has come as far as this. Raises ``ParallelError`` as soon as one of them has gone."""
        with lost_peer("a worker"):
            dist.barrier()

    def least(self, value: int) -> int:
        """The smallest of all ranks' ``value``."""
        smallest = torch.tensor(value)
        with lost_peer("a worker"):
            dist.all_reduce(smallest, dist.ReduceOp.MIN)
        return int(smallest)

    def drain(self) -> None:
        """Wait until all that this rank sent is received: all ranks have run the same steps then."""
        for end in (self.to_next, self.tokens_out):
            if end is not None:
                end.drain()

    def watch(self, on_lost: Callable[[ParallelError], None]) -> None:
        """Have ``on_lost`` called once, in whatever thread, when another rank has left or its process has ended, or the
        ranks cannot go on together: at once, also while nothing is computed. Any thread."""
        self._watch.tell(on_lost)

    def cause(self, error: BaseException) -> ParallelError:
        """What to end with when a step has failed with ``error`` here; the other ranks are told."""
        if not isinstance(error, ParallelError):
            error = ParallelError(f"a step failed on {self.ranks.name()}: {error}")
        return self._watch.cause(error)

    def close(self) -> None:
        """Leave. The other ranks cannot run steps from here on, and are told."""
        self._watch.close()
        self._leave()

    def _leave(self) -> None:
        operators.forget(TENSOR_RANKS)
        overlap.leave(TENSOR_RANKS)
        peer_memory.leave(self._stage)
        dist.destroy_process_group()
