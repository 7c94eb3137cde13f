"""Which of a replica's workers a process is."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """A replica is a grid: ``pp_size`` pipeline stages of ``tp_size`` workers each, one process for each worker."""

    tp_rank: int = 0  # which part of every matrix and which heads it has
    tp_size: int = 1
    pp_rank: int = 0  # which layers it has
    pp_size: int = 1

    @property
    def size(self) -> int:
        """Workers of the replica."""
        return self.tp_size * self.pp_size

    @property
    def index(self) -> int:
        """Its number among all of them."""
        return self.at(self.tp_rank, self.pp_rank)

    @property
    def alone(self) -> bool:
        """Whether it is the only one."""
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether token ids enter here."""
        return self.pp_rank == 0

    @property
    def last(self) -> bool:
        """Whether tokens are sampled here."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """Whether its results have the tokens; all ranks of the last stage sample the same."""
        return self.last and self.tp_rank == 0

    def at(self, tp_rank: int, pp_rank: int) -> int:
        """The number of another worker of the same replica."""
        return pp_rank * self.tp_size + tp_rank

    def name(self, index: int | None = None) -> str:
        """Worker ``index``, None = this one, as messages name it."""
        pp_rank, tp_rank = divmod(self.index if index is None else index, self.tp_size)
        return f"rank tp_rank={tp_rank} pp_rank={pp_rank}"


ALONE = Ranks()
