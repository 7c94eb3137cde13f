"""The parameters that say what an answer has to match: OpenAI's, and vLLM's by their old and new names."""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from services.common.text.grammar_text import MAX_GRAMMAR_BYTES
from services.gateway.openai.body import Body
from services.gateway.openai.json_value import check_schema, check_texts

MAX_CHOICES = 65_536

Schema = dict[str, Any]
SchemaOrText = Schema | Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
Text = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]
SchemaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]

# Of one answer there is one of these.
_WAYS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


def _bounded(value: Schema | str | None) -> Schema | str | None:
    if isinstance(value, dict):
        check_schema(value)
    return value


def _bounded_choices(value: list[str] | None) -> list[str] | None:
    if value is not None:
        check_texts(value)
    return value


class NamedSchema(Body):
    """What a JSON answer is like. It is held to always, ``strict`` or not."""

    name: SchemaName
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None

    _schema_is_bounded = field_validator("schema_")(_bounded)


class ResponseFormat(Body):
    """OpenAI's way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_with_its_type(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("'json_schema' is there exactly with type 'json_schema'")
        return self

    @property
    def wanted(self) -> bool:
        return self.type != "text"


class StructuredOutputs(Body):
    """vLLM's way."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None

    _schema_is_bounded = field_validator("json_")(_bounded)
    _choices_are_bounded = field_validator("choice")(_bounded_choices)

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        for name in ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties"):
            if (self.model_extra or {}).get(name):
                raise ValueError(f"{name!r} is not supported by this server; leave it out")
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise ValueError("expected exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'")
        return self


class GrammarBody(Body):
    """What bodies that ask for an answer have in common."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None

    _schema_is_bounded = field_validator("guided_json")(_bounded)
    _choices_are_bounded = field_validator("guided_choice")(_bounded_choices)

    @model_validator(mode="after")
    def _one_grammar(self) -> "GrammarBody":
        form = self.response_format
        plain = form is not None and not form.wanted
        given = [name for name in _WAYS[plain:] if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: not with {given[0]}, an answer matches one grammar; leave one of them out")
        return self
