"""The position of a worker in its replica."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """The position of a worker in a replica, which is a grid of ``pp_size`` stages with ``tp_size`` workers each."""

    tp_rank: int = 0  # selects the share of each matrix and the heads
    tp_size: int = 1
    pp_rank: int = 0  # selects the layers
    pp_size: int = 1
    whole_experts: bool = False  # the workers of a stage share experts as whole ones, not columns of each

    @property
    def size(self) -> int:
        """Number of workers in the replica."""
        return self.tp_size * self.pp_size

    @property
    def index(self) -> int:
        """Number of this worker in the replica."""
        return self.at(self.tp_rank, self.pp_rank)

    @property
    def alone(self) -> bool:
        """True if the replica has no other worker."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """True for a worker of the first stage, which embeds token ids."""
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        """True for a worker of the last stage, which samples tokens."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """True for the one worker whose results contain the tokens. All ranks of the last stage sample the same."""
        return self.last and self.tp_rank == 0

    def at(self, tp_rank: int, pp_rank: int) -> int:
        """Return the number of the worker at this position in the replica."""
        return pp_rank * self.tp_size + tp_rank

    def name(self, index: int | None = None) -> str:
        """Return the name of worker ``index`` for messages. None means this worker."""
        pp_rank, tp_rank = divmod(self.index if index is None else index, self.tp_size)
        return f"rank tp_rank={tp_rank} pp_rank={pp_rank}"


ALONE = Ranks()
