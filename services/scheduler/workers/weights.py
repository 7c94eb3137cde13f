"""Calls about weights to all workers of a replica."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np

from services.common.errors import FailedPrecondition, TokaError, Unavailable
from services.common.rpc.status import from_rpc_error
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import tensor_pb2, worker_pb2, worker_pb2_grpc
from tokasaurus.worker.v1 import weights_pb2 as worker_weights_pb2

_STAGE_TIMEOUT_S = 1800.0  # for files on a slow disk
_COMMIT_TIMEOUT_S = 300.0
_CHECKSUMS_TIMEOUT_S = 600.0
_TENSOR_TIMEOUT_S = 60.0
_TIMEOUT_S = 10.0

Stubs = Mapping[str, worker_pb2_grpc.WorkerServiceStub]  # by address
R = TypeVar("R")


class Update(NamedTuple):
    """New weights for all workers of a replica."""

    update_id: str
    version: str
    directory: str  # empty: its files were uploaded

    @property
    def uploaded(self) -> bool:
        """True if its files were uploaded."""
        return not self.directory


class WorkerWeights:
    """The weights of the workers on one connection. The methods block, and any thread may call them."""

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self._lock = threading.Lock()  # protects the next two fields
        self._cancels: set[Callable[[], object]] = set()  # end the calls and uploads that run
        self._closed = False

    def stage(self, update: Update) -> tuple[int, int]:
        """Stage ``update`` on all workers. Return its fingerprint, and its bytes in the memory of all hosts.

        Raises the error of a worker, or ``FailedPrecondition`` if the workers read different weights. Then it is staged
        on none.
        """
        request = worker_weights_pb2.StageWeightsRequest(**update._asdict())
        try:
            staged = self.call(lambda stub: stub.StageWeights, request, _STAGE_TIMEOUT_S)
            if len({each.fingerprint for each in staged.values()}) > 1:
                raise FailedPrecondition(
                    f"the workers {', '.join(staged)} read different weights in {update.directory or 'their uploads'}:"
                    " use a file system that all of them share, and write the files before the call"
                )
        except TokaError:
            self.discard(update.update_id)
            raise
        fingerprint = next(iter(staged.values())).fingerprint
        return fingerprint, sum(each.bytes for each in staged.values())

    def commit(self, update_id: str, committed_unix_ns: int = 0) -> weights_pb2.Weights:
        """Commit a staged update on all workers, while no plan is in flight. Return the weights of the first worker.

        ``committed_unix_ns`` is the time of the first commit of an update that is committed again, or 0.

        Raises ``TokaError``. Then workers may have different weights, and a new connection makes them equal.
        """
        request = worker_weights_pb2.CommitWeightsRequest(update_id=update_id, committed_unix_ns=committed_unix_ns)
        committed = self.call(lambda stub: stub.CommitWeights, request, _COMMIT_TIMEOUT_S)
        weights: weights_pb2.Weights = next(iter(committed.values())).weights
        return weights

    def close(self) -> None:
        """Cancel all calls, and fail later ones. The channels may be closed afterwards."""
        with self._lock:
            self._closed = True
            cancels = list(self._cancels)
        for cancel in cancels:
            cancel()

    @contextmanager
    def cancelling(self, cancel: Callable[[], object]) -> Iterator[None]:
        """Call ``cancel`` if the connection ends before the block does. Raises ``Unavailable`` if it has ended."""
        with self._lock:
            if self._closed:
                raise _ended()
            self._cancels.add(cancel)
        try:
            yield
        finally:
            with self._lock:
                self._cancels.discard(cancel)

    def discard(self, update_id: str, *, remove_upload: bool = False) -> None:
        """Forget an update on all workers, as far as they can be called.

        ``remove_upload``: also remove its uploaded files. It must be False after a commit was sent, because a rank may
        need them.
        """
        request = worker_weights_pb2.DiscardWeightsRequest(update_id=update_id, remove_upload=remove_upload)
        self._gather(lambda stub: stub.DiscardWeights, request, _TIMEOUT_S)

    def read(self, *, checksums: bool) -> dict[str, worker_weights_pb2.GetWeightsResponse]:
        """Return the weights of each worker by address. Raises ``TokaError``."""
        request = worker_weights_pb2.GetWeightsRequest(checksums=checksums)
        return self.call(lambda stub: stub.GetWeights, request, _CHECKSUMS_TIMEOUT_S if checksums else _TIMEOUT_S)

    def read_rows(self, name: str, rows: int) -> np.ndarray:
        """Return the first ``rows`` rows of the checkpoint's tensor ``name``, float32, from all workers.

        Raises the error of a worker.
        """
        request = tensor_pb2.ReadTensorRequest(name=name, rows=rows)
        found = self.call(lambda stub: stub.ReadTensor, request, _TENSOR_TIMEOUT_S)
        shape = tuple(next(iter(found.values())).shape)
        whole = np.full(math.prod(shape), np.nan, np.float32)
        for response in found.values():
            if len(response.values):
                whole = np.where(np.isnan(whole), np.asarray(response.values, np.float32), whole)
        return whole.reshape(shape)

    def call(self, method: Callable[[Any], Callable[..., Any]], request: object, timeout_s: float) -> dict[str, Any]:
        """Send ``request`` to each worker. Return the responses by address.

        Raises the first error, with the address of its worker.
        """
        responses, error = self._gather(method, request, timeout_s)
        if error is not None:
            raise error
        return responses

    def _gather(
        self, method: Callable[[Any], Any], request: object, timeout_s: float
    ) -> tuple[dict[str, Any], TokaError | None]:
        with self._lock:
            if self._closed:
                return {}, _ended()
            calls = {address: method(stub).future(request, timeout=timeout_s) for address, stub in self._stubs.items()}
            cancels = {call.cancel for call in calls.values()}
            self._cancels |= cancels
        responses: dict[str, Any] = {}
        first: TokaError | None = None
        for address, call in calls.items():
            try:
                responses[address] = call.result()
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                found = from_rpc_error(error) if isinstance(error, grpc.RpcError) else Unavailable("disconnected")
                found.message = f"worker {address}: {found.message}"
                first = first or found
        with self._lock:
            self._cancels -= cancels
        return responses, first


def _ended() -> Unavailable:
    return Unavailable("the connection to the workers has ended; try again")


def restore(
    weights: WorkerWeights, infos: Mapping[str, worker_pb2.WorkerInfo], last: weights_pb2.Weights
) -> weights_pb2.Weights:
    """Give all workers the weights that were committed last, at their first time. Return these.

    ``infos`` are those of the workers, by address, and ``last`` are the weights that the scheduler knows. A worker that
    has restarted has those of its start. Raises ``TokaError`` if they cannot be read again.
    """
    present = [info.weights for info in infos.values()]
    newest = max([last, *present], key=lambda each: each.committed_unix_ns)
    if all(each.update_id == newest.update_id for each in present):
        return newest
    update = Update(newest.update_id, newest.version, "" if newest.uploaded else newest.directory)
    try:
        fingerprint, _ = weights.stage(update)
    except TokaError as error:
        raise _not_restored(newest, error.message) from error
    if fingerprint != newest.fingerprint:
        weights.discard(update.update_id)
        raise _not_restored(newest, f"the files in {newest.directory} have changed")
    return weights.commit(update.update_id, newest.committed_unix_ns)


def _not_restored(newest: weights_pb2.Weights, reason: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"a worker has restarted with other weights than those of version {newest.version!r}, which cannot be read"
        f" again: {reason}; put them back, or restart the scheduler and its workers"
    )
