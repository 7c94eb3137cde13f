"""Reading of a checkpoint's tensors from a model that runs."""

import difflib
import math
import re
from collections.abc import Iterable

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
        raise NotFound(
            f"the model has no tensor {name[:256]!r}; did you mean {_similar(name[:256], shapes)!r}? Names are those of"
            " the checkpoint",
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


def _similar(name: str, names: Iterable[str]) -> str:
    """Return the first of ``names`` that is most similar to ``name`` without its numbers.

    Names that differ only in the numbers of layers and experts are compared once, because there may be 100,000.
    """
    by_form = {_form(each): each for each in reversed(list(names))}
    [closest] = difflib.get_close_matches(_form(name), by_form, 1, 0)
    return by_form[closest]


def _form(name: str) -> str:
    return re.sub(r"\d+", "0", name)
