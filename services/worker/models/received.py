"""Tensors of new weights that arrive one after the other from a trainer."""

from collections.abc import Collection, Mapping

import torch

from services.common.errors import FailedPrecondition, InvalidRequest
from services.common.model.checkpoint_files import StoredTensor
from services.worker.arena.host_copy import empty_on_host, free_on_host
from services.worker.described.checkpoint import EMBEDDING, HEAD, checkpoint_shapes
from services.worker.described.config import ModelConfig
from services.worker.models.base import Staged
from services.worker.models.staging import check_described, check_unused, fingerprint_of, is_finite

_PLACE = "the update"  # place of a tensor in errors


class ReceivedTensors:
    """The tensors of one update that have arrived, in host memory. Used by one thread at a time."""

    def __init__(self, wanted: Collection[str], described: ModelConfig) -> None:
        """``wanted``: names of the checkpoint's tensors that the rank needs. ``described``: the checkpoint's model."""
        self._wanted, self._described = wanted, described
        self._expected = checkpoint_shapes(described)
        self._arrived: dict[str, StoredTensor] = {}
        self._kept: dict[str, torch.Tensor] = {}
        self._fingerprint = 0
        self._tied: set[int] = set()  # fingerprints of the values of the embedding and the head, if they are tied

    def check(self, tensors: Mapping[str, StoredTensor]) -> None:
        """Check the descriptions, by name, of tensors that will arrive next.

        Raises ``InvalidRequest``, which names the tensor, if one has arrived before, is unexpected, or is of another
        shape or dtype. Raises ``FailedPrecondition`` if there is too little memory.
        """
        try:
            if twice := sorted(tensors.keys() & self._arrived.keys()):
                raise InvalidRequest(f"{_PLACE}: {twice[0]} has arrived before; send each tensor once")
            check_described(_PLACE, tensors, self._expected, self._described)
            if not self._expected.keys() - self._arrived.keys() - tensors.keys():
                check_unused(_PLACE, self._arrived | dict(tensors), self._expected)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, field="tensors") from error
        needed = sum(tensors[name].nbytes for name in tensors.keys() & set(self._wanted))
        if needed > free_on_host(needed):
            raise FailedPrecondition("the host has too little memory for a copy of the weights; end other programs")

    def add(self, name: str, stored: StoredTensor, tensor: torch.Tensor) -> torch.Tensor:
        """Keep ``tensor``, whose description ``stored`` was checked. Return it in host memory.

        Raises ``InvalidRequest`` if a value is not finite.
        """
        if not is_finite(tensor):
            raise InvalidRequest(
                f"{_PLACE}: {name} has values that are not finite, or fewer elements were sent than its shape has",
                field="tensors",
            )
        host = tensor
        if tensor.device.type != "cpu":
            host = empty_on_host(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
        self._arrived[name] = stored
        if name in self._expected:
            self._fingerprint ^= fingerprint_of(name, host)
        if name in self._wanted:
            self._kept[name] = host
        if self._described.tied_embeddings and name in (EMBEDDING, HEAD):
            self._tied.add(fingerprint_of("", host.float()))
        return host

    @property
    def missing(self) -> list[str]:
        """The names of the checkpoint's tensors that have not arrived, in their order."""
        return sorted(self._expected.keys() - self._arrived.keys())

    def staged(self) -> Staged:
        """Return the weights. Raises ``InvalidRequest``, which names the tensor, if they are incomplete."""
        if missing := self.missing:
            raise InvalidRequest(
                f"{_PLACE}: {len(missing)} tensors of the model have not arrived, e.g. {missing[0]}; send all of them",
                field="tensors",
            )
        if len(self._tied) > 1:
            raise InvalidRequest(
                f"{_PLACE}: {HEAD} differs from {EMBEDDING}, and config.json ties them; leave {HEAD} out",
                field="tensors",
            )
        return Staged(self._kept, self._fingerprint)
