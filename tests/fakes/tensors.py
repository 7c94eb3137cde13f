"""Reading of tensors by name from a fake worker."""

from services.common.errors import FailedPrecondition, InvalidRequest, NotFound
from services.common.memory_parts import MemoryPart, Parts
from tokasaurus.common.v1 import weights_pb2
from tokasaurus.worker.v1 import tensor_pb2

SIZE = 8  # elements of the only tensor


class FakeTensors:
    """Base class of fake workers. Each element of the tensor ``norm`` is the number of the weights."""

    weights: weights_pb2.Weights
    asleep: Parts

    async def ReadTensor(self, request, context):
        if MemoryPart.WEIGHTS in self.asleep:
            raise FailedPrecondition("the weights are asleep; wake them first")
        if request.name != "norm":
            raise NotFound(f"the model has no tensor {request.name!r}; did you mean 'norm'?", field="name")
        if not 1 <= request.rows <= 1000:
            raise InvalidRequest("read at most 1000 rows", field="rows")
        size = min(request.rows, SIZE)
        return tensor_pb2.ReadTensorResponse(shape=[size], values=[self.weights.fingerprint] * size)
