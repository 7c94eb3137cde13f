"""The parameters for the form of an answer: OpenAI's, and vLLM's with their old and new names."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from services.common.text.grammar_text import MAX_GRAMMAR_BYTES
from services.gateway.openai.body import Body, optional
from services.gateway.openai.json_value import Schema, check_texts

MAX_CHOICES = 65_536

Text = Annotated[str, Field(max_length=MAX_GRAMMAR_BYTES)]
SchemaOrText = Schema | Text
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES), AfterValidator(check_texts)]
SchemaName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]

# Parameters of which a request may have one.
_WAYS = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
# vLLM's parameters that select a library. All of its libraries enforce the same form.
_BACKENDS = frozenset({"backend", "disable_fallback", "_backend", "_backend_was_auto"})


def refuse_extras(body: Body, where: str, harmless: frozenset[str] = frozenset()) -> None:
    """Raise ``ValueError`` for an unknown member of ``body``, which could restrict the answer.

    A member that is null, false or in ``harmless`` changes nothing. ``where``: name of the parameter for the message.
    """
    for name, value in (body.model_extra or {}).items():
        if name not in harmless and value is not None and value is not False:
            raise ValueError(f"{name[:64]!r} is not supported in {where}; leave it out")


class NamedSchema(Body):
    """A JSON Schema with a name. The answer always matches it, with and without ``strict``."""

    consulted = None

    name: SchemaName
    description: str | None = None
    schema_: Schema = Field(alias="schema", description="JSON Schema, draft 2020-12.")
    strict: bool | None = optional("Accepted: the answer always matches the schema.")

    @model_validator(mode="after")
    def _nothing_unknown(self) -> "NamedSchema":
        refuse_extras(self, "json_schema")
        return self


class ResponseFormat(Body):
    """``response_format``: OpenAI's types, and the forms of other engines for a schema or a regular expression.

    Text Generation Inference and huggingface_hub write ``{"type": "json", "value": SCHEMA}`` and ``{"type": "regex",
    "value": REGEX}``. Together and llama.cpp write ``{"type": "json_object", "schema": SCHEMA}``.
    """

    consulted = None

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    json_schema: NamedSchema | None = optional("For type json_schema.")
    schema_: Annotated[
        SchemaOrText | None,
        Field(alias="schema", description="The schema alone, for type json_object, json_schema or json."),
    ] = None
    value: SchemaOrText | None = optional("The same as schema. For type regex, a regular expression.")
    pattern: Text | None = optional("A regular expression for the whole answer, for type regex.")
    strict: bool | None = optional("Accepted: the answer always has the given form.")

    @model_validator(mode="after")
    def _one_source_that_suits_the_type(self) -> "ResponseFormat":
        if self.wanted:
            refuse_extras(self, "response_format", harmless=frozenset({"name", "description"}))
        given = [name for name in _SOURCES if getattr(self, _SOURCES[name]) is not None]
        allowed = _ALLOWED[self.type]
        for name in given:
            if name not in allowed:
                raise ValueError(f"{name!r} has no meaning with type {self.type!r}; {_advice(self.type)}")
        if len(given) > 1:
            raise ValueError(f"{given[1]!r} does not go with {given[0]!r}; send one of them")
        if not given and self.type in ("json_schema", "regex"):
            raise ValueError(f"type {self.type!r} needs {allowed[0]!r}; {_advice(self.type)}")
        if self.type == "regex" and isinstance(self.value, dict):
            raise ValueError("'value' with type 'regex' is a regular expression, not an object; send it as a string")
        return self

    @property
    def wanted(self) -> bool:
        """True if the answer must have a form."""
        return self.type != "text"

    @property
    def regex(self) -> str | None:
        """The regular expression of the whole answer, or None if the answer is JSON or free text."""
        value = self.pattern if self.pattern is not None else self.value
        return value if self.type == "regex" and isinstance(value, str) else None

    @property
    def schema_of_answer(self) -> SchemaOrText:
        """The JSON Schema of the answer as an object or as text, if the answer must be JSON."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        given = self.schema_ if self.schema_ is not None else self.value
        if self.type == "json_schema" and isinstance(given, dict) and "name" in given:
            inner = given.get("schema")  # Text Generation Inference has a named schema here, as in OpenAI's json_schema
            given = inner if isinstance(inner, dict) else given
        return {"type": "object"} if given is None else given


# Members of ``response_format`` that have the form, with their attributes.
_SOURCES = {"json_schema": "json_schema", "schema": "schema_", "value": "value", "pattern": "pattern"}
_ALLOWED: dict[str, tuple[str, ...]] = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "schema", "value"),
    "json": ("value", "schema"),
    "regex": ("value", "pattern"),
}


def _advice(kind: str) -> str:
    allowed = _ALLOWED[kind]
    return f"send {' or '.join(map(repr, allowed))}" if allowed else "leave it out, or send another type"


class StructuredOutputs(Body):
    """``structured_outputs``, vLLM's parameter for the form of an answer."""

    consulted = None

    json_: Annotated[SchemaOrText | None, Field(alias="json", description="A JSON Schema, or its text.")] = None
    json_object: bool | None = optional("true: the answer is a JSON object.")
    regex: Text | None = optional("A regular expression for the whole answer, in Rust's syntax.")
    choice: Choices | None = optional("The answer is one of these texts.")
    grammar: Text | None = optional("A grammar in llguidance's Lark, or in GBNF.")

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        refuse_extras(self, "structured_outputs", harmless=_BACKENDS)
        given = [self.json_, self.json_object or None, self.regex, self.choice, self.grammar]
        if sum(value is not None for value in given) != 1:
            raise ValueError("expected exactly one of 'json', 'json_object', 'regex', 'choice' and 'grammar'")
        return self


class GrammarBody(Body):
    """The fields for the form of an answer, which all bodies of text completions share."""

    response_format: ResponseFormat | None = optional("Form of the answer. See Structured output in docs/api.md.")
    structured_outputs: StructuredOutputs | None = optional(
        "Form of the answer, as in vLLM. See Structured output in docs/api.md."
    )
    guided_json: SchemaOrText | None = optional("A JSON Schema, or its text.")
    guided_regex: Text | None = optional("A regular expression for the whole answer, in Rust's syntax.")
    guided_choice: Choices | None = optional("The answer is one of these texts.")
    guided_grammar: Text | None = optional("A grammar in llguidance's Lark, or in GBNF.")

    @model_validator(mode="after")
    def _one_grammar(self) -> "GrammarBody":
        form = self.response_format
        plain = form is not None and not form.wanted
        given = [name for name in _WAYS[plain:] if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{given[1]}: not with {given[0]}, an answer matches one grammar; leave one of them out")
        return self
