"""The job of the child process that compiles kernels. This module does not import torch."""

from typing import NamedTuple

from pydantic import BaseModel

from services.common.config import ChosenWorkerConfig


class GpuTarget(NamedTuple):
    """The properties of a GPU on which its kernels depend."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes
    flashinfer: bool  # true if attention uses FlashInfer, whose kernels are not compiled here


class Job(BaseModel):
    """A start whose kernels are to be compiled."""

    config: ChosenWorkerConfig
    dtype: str  # of the model, by its name in torch
    gpu: GpuTarget
