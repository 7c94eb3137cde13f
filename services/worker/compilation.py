"""torch.compile for the model's forward pass."""

import contextlib
from collections.abc import Iterator

import torch

from services.common.errors import InvalidRequest
from services.worker.models.decoder import DecoderModel


def compile_model(model: DecoderModel) -> None:
    """Compile ``model`` in place, for any number of tokens. It happens at the first calls, which are the warm-up's."""
    model.forward = torch.compile(model.forward, dynamic=True, fullgraph=True)


@contextlib.contextmanager
def refusing_what_cannot_be_compiled() -> Iterator[None]:
    """Around those first calls: raises ``InvalidRequest`` where torch finds no compiler or fails with it."""
    try:
        yield
    except torch._dynamo.exc.TorchDynamoException as error:
        raise InvalidRequest(
            f"flag torch_compile=T: torch cannot compile here ({str(error).strip().splitlines()[0]});"
            " install a C++ compiler or leave the flag out",
            field="torch_compile",
        ) from error
