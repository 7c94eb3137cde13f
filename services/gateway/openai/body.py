"""What all that a client sends has in common."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("no id has a NUL character; send the id as you got it")
    return value


# Of a thing in the store, as a client says it. No id has a NUL character, and PostgreSQL does not even look for one.
Id = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]


class Elsewhere(NamedTuple):
    """A parameter of another endpoint, which whoever sends it here counts on."""

    instead: str = ""  # what stands for it here
    neutrals: tuple[Any, ...] = ()  # with these values it changes nothing


class Body(BaseModel):
    """Strict: ``"3"`` is not a number. Unknown parameters end up in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    nested: ClassVar[tuple[str, ...]] = ()  # fields whose unknown parameters are told, too
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}  # other engines' names -> fields of the same meaning

    _given: dict[str, str] = PrivateAttr(default_factory=dict)

    def remember(self, given: dict[str, str]) -> None:
        """Take note of the names that the client used in place of fields, by field."""
        self._given = given

    def name_given(self, field: str) -> str:
        """Return the name under which the client sent ``field``."""
        return self._given.get(field, field)
