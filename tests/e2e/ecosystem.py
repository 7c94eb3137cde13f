"""Requests whose answers are known, shared by the smoke tests of other projects' clients.

The server is the ``parrot`` fixture: it repeats the last user message, or the last tool result.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

GREETING = "Hello from Cologne, how are you?"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
REPORT = "It rains in Köln."
TOO_LONG = "word " * 4000  # the context has 2,048 tokens
CONTEXT_MESSAGE = "This model's maximum context length is 2048 tokens"
CITY_TEXT = '{"name": "Köln", "districts": 9}'
WRONG_CITY_TEXT = '{"name": "Bern", "area": 12}'  # the schema turns it into a city


class City(BaseModel):
    """A city. Every field is bounded, so that each answer ends."""

    model_config = ConfigDict(extra="forbid")

    name: Literal["Köln", "Bonn"]
    districts: int = Field(ge=1, le=9)


CITY_SCHEMA = City.model_json_schema()
CITY_FORMAT = {"type": "json_schema", "json_schema": {"name": "City", "schema": CITY_SCHEMA, "strict": True}}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Report the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def weather(city: str) -> str:
    """Report the weather of a city."""
    return f"It rains in {city}."


def user(content: str) -> list[dict]:
    """Return a conversation of one user message."""
    return [{"role": "user", "content": content}]
