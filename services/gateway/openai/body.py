"""What all that a client sends has in common."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Strict: ``"3"`` is not a number. Unknown parameters end up in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    nested: ClassVar[tuple[str, ...]] = ()  # fields whose unknown parameters are told, too
