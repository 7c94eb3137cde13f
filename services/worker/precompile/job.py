"""What the child that compiles kernels is told. No torch here."""

from typing import NamedTuple

from pydantic import BaseModel

from services.common.config import ChosenWorkerConfig


class Gpu(NamedTuple):
    """What programs ask about a GPU."""

    name: str
    capability: tuple[int, int]
    memory: int  # bytes
    flashinfer: bool  # whether FlashInfer attends there; its kernels are not compiled here


class Job(BaseModel):
    """A start whose kernels are to be compiled."""

    config: ChosenWorkerConfig
    dtype: str  # of the model, as torch names it
    gpu: Gpu
