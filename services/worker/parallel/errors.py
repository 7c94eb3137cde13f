"""What it means when another worker of the replica is gone."""

import contextlib
from collections.abc import Iterator

from services.common.errors import PEER_LOST_STATUS, Unavailable


class ParallelError(Unavailable):
    """A worker of this replica is lost, or cannot go on: none of the others can run a step before all are started
    again. The process that gets it should end."""

    reason = "PEER_LOST"
    exit_status = PEER_LOST_STATUS


@contextlib.contextmanager
def lost_peer(who: str) -> Iterator[None]:
    """Around what needs ``who``: raises ``ParallelError`` where torch.distributed fails."""
    try:
        yield
    except ParallelError:
        raise
    except RuntimeError as error:
        raise ParallelError(
            f"{who} of this replica is lost ({_first_sentence(error)}); start all of its workers again"
        ) from error


def _first_sentence(error: RuntimeError) -> str:
    """Without where in torch it was raised, and without advice to look elsewhere."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.partition("] ")[2] if line.startswith("[") and "] " in line else line
    return line.partition(". ")[0]
