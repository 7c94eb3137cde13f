"""What all that a client sends has in common."""

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """Strict: ``"3"`` is not a number. Unknown parameters end up in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
