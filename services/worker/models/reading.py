"""Reading of a checkpoint's tensors from a model that runs."""

import difflib
import math

import torch

from services.common.errors import InvalidRequest, NotFound
from services.common.request_bounds import MAX_TENSOR_VALUES
from services.worker.described.checkpoint import EMBEDDING, HEAD, checkpoint_shapes
from services.worker.described.config import ModelConfig
from services.worker.layers.fp8 import copy_rows
from services.worker.models.base import TensorRows
from services.worker.models.decoder import DecoderModel


@torch.no_grad()
def read_rows(model: DecoderModel, described: ModelConfig, name: str, rows: int) -> TensorRows:
    """Return the first ``rows`` rows of the checkpoint's tensor ``name``, which ``described`` describes.

    A head that is tied to the embedding has the embedding's values. Raises ``NotFound`` with a similar name, and
    ``InvalidRequest`` if the rows have too many values.
    """
    shapes = checkpoint_shapes(described)
    name = EMBEDDING if described.tied_embeddings and name == HEAD else name
    if name not in shapes:
        similar = difflib.get_close_matches(name[:256], shapes, 1, 0) or [EMBEDDING]
        raise NotFound(
            f"the model has no tensor {name[:256]!r}; did you mean {similar[0]!r}? Names are those of the checkpoint",
            field="name",
        )
    shape = (min(rows, shapes[name][0]), *shapes[name][1:])
    if math.prod(shape) > MAX_TENSOR_VALUES:
        row = math.prod(shape[1:])
        raise InvalidRequest(
            f"{shape[0]} rows of {name} have {math.prod(shape)} values; read at most {MAX_TENSOR_VALUES // row} rows",
            field="rows",
        )
    if (target := model.targets().get(name)) is None:
        return TensorRows(shape, None)
    values = torch.full(shape, torch.nan, dtype=torch.float32)
    copy_rows(target, values)
    return TensorRows(shape, values)
