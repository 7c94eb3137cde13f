"""The base class of all request bodies."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
)
from pydantic_core import CoreSchema

from services.common.json_scan import Bulk

_KEPT_CHARACTERS = 512  # of an unknown parameter's value
_NAME_CHARACTERS = 64
# Placeholder for the value of an unknown parameter that is a list or an object with content.
_DROPPED = (...,)


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("no id has a NUL character; send the id as you got it")
    return value


# Id of an object in the store, as a client sends it. No id has a NUL character, which PostgreSQL rejects in queries.
Id = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]


def optional(description: str) -> Any:
    """Return the default of a parameter that may be left out or null."""
    return Field(default=None, description=description)


class Elsewhere(NamedTuple):
    """A parameter of another endpoint or engine. It is rejected, because a client that sends it relies on it."""

    instead: str = ""  # parameter to send instead, if there is one
    neutrals: tuple[Any, ...] = ()  # values that change nothing, and are accepted


class UnknownNames:
    """Validation context: the number of unknown names that a body may still keep."""

    def __init__(self, left: int) -> None:
        self.left = left


def _lists(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of lists in ``schema``."""
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            yield schema
        for part in schema.values():
            yield from _lists(part)
    elif isinstance(schema, list | tuple):
        for part in schema:
            yield from _lists(part)


class Body(BaseModel):
    """A JSON object of a request. Types are strict: ``"3"`` is not a number.

    Validation of a list ends at its first wrong item. ``model_extra`` has the unknown parameters. Long strings among
    their values are cut. A list or an object is replaced by a tuple, which is empty if the value was.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    nested: ClassVar[tuple[str, ...]] = ()  # fields whose unknown parameters the response's header lists, too
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}  # other engines' names -> fields of the same meaning
    bulks: ClassVar[Mapping[str, Bulk]] = {}  # fields that may have more values than a whole body usually has
    # Unknown parameters that are always kept, since a validator examines them. None: all of them.
    consulted: ClassVar[frozenset[str] | None] = frozenset()

    _given: dict[str, str] = PrivateAttr(default_factory=dict)
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema, with lists that stop at their first error: a body may have millions of wrong items."""
        schema = handler(source)
        for part in _lists(schema):
            part["fail_fast"] = True
        return schema

    def model_post_init(self, context: Any, /) -> None:
        """Drop the values of unknown parameters."""
        if extra := self.__pydantic_extra__:
            self.__pydantic_extra__ = self._without_values(extra, context)

    @model_serializer(mode="wrap")
    def _without_dropped(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the body as a dict, without the unknown parameters whose values were dropped."""
        found: dict[str, Any] = serialize(self)
        for name, value in (self.__pydantic_extra__ or {}).items():
            if isinstance(value, tuple):  # a dropped value: JSON itself has no tuples
                found.pop(name, None)
        return found

    def _without_values(self, extra: dict[str, Any], context: Any) -> dict[str, Any]:
        kept = {}
        for name, value in extra.items():
            always = self.consulted is None or name in self.consulted
            if not always and isinstance(context, UnknownNames):
                if not context.left:
                    continue
                context.left -= 1
            kept[name[:_NAME_CHARACTERS]] = _without_content(value)
        return kept

    def remember(self, given: dict[str, str], ignored: tuple[str, ...]) -> None:
        """Store the names that the client used for fields, by field, and the paths of the unknown parameters."""
        self._given, self._ignored = given, ignored

    def name_given(self, field: str) -> str:
        """Return the name under which the client sent ``field``."""
        return self._given.get(field, field)

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of the unknown parameters, as the response's header lists them."""
        return self._ignored


def _without_content(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_KEPT_CHARACTERS]
    if isinstance(value, list | dict):
        return _DROPPED if value else ()
    return value
