"""Defaults and ranges of the numeric sampling parameters, named as in the message ``Sampling``.

All services read this table. The gateway derives the fields of HTTP bodies from it, and the scheduler and the worker
check messages with ``out_of_range``.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # the scheduler's core and the rules of plans import no messages
    from tokasaurus.common.v1.sampling_pb2 import Sampling


class Parameter(NamedTuple):
    """Default and range of one parameter. Both bounds are inclusive, unless ``exclusive`` excludes ``least``."""

    default: float  # of a request, if neither the request nor the model's generation_config sets it
    least: float
    most: float
    exclusive: bool = False
    off: bool = False  # error messages say that the default turns the parameter off

    @property
    def expected(self) -> str:
        """The range in words."""
        text = f"more than {self.least:g} and at most" if self.exclusive else f"{self.least:g} to"
        return f"{text} {self.most:g}{f', {self.default:g} = off' if self.off else ''}"

    def allows(self, value: float) -> bool:
        """Return whether ``value`` is in the range. NaN is in no range."""
        return (self.least < value if self.exclusive else self.least <= value) and value <= self.most


PARAMETERS = {
    "temperature": Parameter(1, 0, 100),
    "top_p": Parameter(1, 0, 1, exclusive=True),
    "top_k": Parameter(0, 0, 2**32 - 1),
    "min_p": Parameter(0, 0, 1),
    # The message holds 32-bit floats.
    "repetition_penalty": Parameter(1, float(np.float32(0.01)), 100, off=True),
    "frequency_penalty": Parameter(0, -2, 2, off=True),
    "presence_penalty": Parameter(0, -2, 2, off=True),
}


def out_of_range(sampling: "Sampling") -> tuple[str, str] | None:
    """Return the name of a parameter outside its range and an error message, or None if there is no such parameter."""
    for name, parameter in PARAMETERS.items():
        if sampling.HasField(name) and not parameter.allows(value := getattr(sampling, name)):
            return name, f"{name} is {value:g}: expected {parameter.expected}"
    return None
