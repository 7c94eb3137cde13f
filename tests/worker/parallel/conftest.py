"""Four processes for all tests of ranks, and the replica that runs on them."""

from collections.abc import Callable, Iterator

import pytest

from tests.worker.parallel.pool import RankPool
from tests.worker.parallel.replica import Replica


class Replicas:
    """At most one at a time; the one that is up is used again where it is the same."""

    def __init__(self, pool: RankPool) -> None:
        self.pool = pool
        self._key, self._up = None, None

    def get(self, tp_size: int, pp_size: int, directory, fewest_sharded: int = 10**6, **flags) -> Replica:
        key = tp_size, pp_size, directory, fewest_sharded, tuple(sorted(flags.items()))
        if key != self._key:
            self.close()
            self._up = Replica(self.pool, tp_size, pp_size, directory, flags, fewest_sharded)
            self._key = key
        self._up.reset()
        self._up.parts = 1
        return self._up

    def close(self) -> None:
        if self._up is not None:
            self._up.close()
        self._key, self._up = None, None


@pytest.fixture(scope="package")
def replicas() -> Iterator[Replicas]:
    made = Replicas(RankPool(*[{}] * 4))
    yield made
    made.pool.close()


@pytest.fixture
def replica_of(replicas) -> Callable[..., Replica]:
    """``replica_of(tp_size, pp_size, directory, flag=value, ...)``: an empty one."""
    return replicas.get


@pytest.fixture
def pool(replicas) -> RankPool:
    """The processes, none of which is part of a replica."""
    replicas.close()
    return replicas.pool
