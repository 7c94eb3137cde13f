"""Reads the messages of UploadWeights."""

from collections.abc import Iterable, Iterator

from services.common.errors import InvalidRequest
from services.common.model.checkpoint_files import FLOATS, MOST_DIMENSIONS, StoredTensor
from tokasaurus.common.v1 import weights_pb2 as common_weights_pb2
from tokasaurus.worker.v1 import weights_pb2

_MOST_ELEMENTS = 2**63 - 1  # of a dimension; torch counts them in 64 bits with a sign


def read_header(first: weights_pb2.UploadWeightsRequest | None) -> weights_pb2.UploadHeader:
    """Return the header in the first message. Raises ``InvalidRequest``."""
    if first is None or not first.HasField("header"):
        raise InvalidRequest("the first message of UploadWeights must be a header", field="header")
    return first.header


def read_tensors(
    described: Iterable[common_weights_pb2.UploadedTensor], field: str = "header.tensors"
) -> dict[str, StoredTensor]:
    """Return the descriptions of the tensors by name. Raises ``InvalidRequest``, which names the tensor.

    ``field`` is the field of the request with the descriptions.
    """
    tensors: dict[str, StoredTensor] = {}
    for each in described:
        if each.name in tensors:
            raise InvalidRequest(f"{each.name[:256]} is in {field} twice; leave one out", field=field)
        if each.dtype not in FLOATS:
            expected = ", ".join(sorted(FLOATS))
            raise InvalidRequest(
                f"{each.name[:256]} has dtype {each.dtype[:64]!r}; expected one of {expected}", field=field
            )
        if len(each.shape) > MOST_DIMENSIONS:  # the size of more would take hours to compute
            raise InvalidRequest(
                f"{each.name[:256]} has {len(each.shape)} dimensions; expected at most {MOST_DIMENSIONS}",
                field=field,
            )
        if max(each.shape, default=0) > _MOST_ELEMENTS:
            raise InvalidRequest(
                f"{each.name[:256]} has a dimension of {max(each.shape)} elements; expected at most {_MOST_ELEMENTS}",
                field=field,
            )
        tensors[each.name] = StoredTensor(each.dtype, tuple(each.shape))
    return tensors


def read_chunks(requests: Iterable[weights_pb2.UploadWeightsRequest]) -> Iterator[common_weights_pb2.TensorChunk]:
    """Yield the chunks of the messages after the header. Raises ``InvalidRequest`` for another message."""
    for request in requests:
        if not request.HasField("chunk"):
            raise InvalidRequest("expected a chunk after the header", field="chunk")
        yield request.chunk
