"""The error of a replica that has lost a worker."""

import contextlib
from collections.abc import Iterator

from services.common.errors import PEER_LOST_STATUS, Unavailable


class ParallelError(Unavailable):
    """A worker of the replica is lost or has failed. The process should exit, since no worker can run further steps."""

    reason = "PEER_LOST"
    exit_status = PEER_LOST_STATUS


@contextlib.contextmanager
def lost_peer(name: str) -> Iterator[None]:
    """Turn an error of torch.distributed in a call to the worker ``name`` into ``ParallelError``."""
    try:
        yield
    except ParallelError:
        raise
    except RuntimeError as error:
        raise ParallelError(
            f"{name} of this replica is lost ({first_sentence(error)}); start all of its workers again"
        ) from error


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of the message, without the location in torch's source."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    line = line.partition("] ")[2] if line.startswith("[") and "] " in line else line
    return line.partition(". ")[0]
