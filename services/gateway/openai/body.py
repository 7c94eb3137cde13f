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
_SOMETHING = (...,)  # stands for the value of an unknown parameter that is a list or an object and not empty


def _without_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("no id has a NUL character; send the id as you got it")
    return value


# Id of an object in the store, as a client sends it. No id has a NUL character, and PostgreSQL refuses to look for one.
Id = Annotated[str, Field(min_length=1), AfterValidator(_without_nul)]


class Elsewhere(NamedTuple):
    """A parameter of another endpoint. A client that sends it here relies on it."""

    instead: str = ""  # what stands for it here
    neutrals: tuple[Any, ...] = ()  # with these values it changes nothing


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
    """Strict: ``"3"`` is not a number. Validation of a list ends at its first wrong item.

    ``model_extra`` has the names of unknown parameters. Of their values it has scalars and short strings; a list or an
    object is dropped, and an empty or a full tuple stands for it.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    nested: ClassVar[tuple[str, ...]] = ()  # fields whose unknown parameters the response's header lists, too
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {}
    other_names: ClassVar[Mapping[str, str]] = {}  # other engines' names -> fields of the same meaning
    bulks: ClassVar[Mapping[str, Bulk]] = {}  # fields with more values than other bodies may have
    # Unknown parameters that are kept always, since one of them may change the answer; None: all of them.
    consulted: ClassVar[frozenset[str] | None] = frozenset()
    keeps_unknown: ClassVar[bool] = False  # with their values: the model is shown them

    _given: dict[str, str] = PrivateAttr(default_factory=dict)
    _ignored: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema, in which no list collects more errors than one: a body may have millions of items."""
        schema = handler(source)
        for part in _lists(schema):
            part["fail_fast"] = True
        return schema

    def model_post_init(self, context: Any, /) -> None:
        """Drop what unknown parameters hold."""
        if (extra := self.__pydantic_extra__) and not self.keeps_unknown:
            self.__pydantic_extra__ = self._without_values(extra, context)

    @model_serializer(mode="wrap")
    def _without_dropped(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the body as a dict, without unknown parameters whose values were dropped. Those are not JSON."""
        found: dict[str, Any] = serialize(self)
        for name, value in (self.__pydantic_extra__ or {}).items():
            if isinstance(value, tuple):  # JSON has lists: a tuple stands for what was dropped
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

    def remember(self, given: dict[str, str]) -> None:
        """Store the names that the client used in place of fields, by field."""
        self._given = given

    def name_given(self, field: str) -> str:
        """Return the name under which the client sent ``field``."""
        return self._given.get(field, field)

    def remember_ignored(self, names: tuple[str, ...]) -> None:
        """Store the paths of the unknown parameters."""
        self._ignored = names

    @property
    def ignored(self) -> tuple[str, ...]:
        """Paths of the unknown parameters, as the response's header lists them."""
        return self._ignored


def _without_content(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_KEPT_CHARACTERS]
    if isinstance(value, list | dict):
        return _SOMETHING if value else ()
    return value
