"""Bodies made from the JSON Schemas in ``/openapi.json``."""

from collections.abc import Collection, Iterator
from random import Random
from typing import Any, NamedTuple

from bench.fuzz.values import scalar, value

_MOST_DEPTH = 6


class Operation(NamedTuple):
    """A method of a path."""

    method: str
    path: str  # with {names}
    body: Any  # schema of the body; None: no JSON
    queries: tuple[str, ...]


class Api:
    """The server's OpenAPI document, except for the paths ``left_out``."""

    def __init__(self, document: dict[str, Any], left_out: Collection[str] = ()) -> None:
        self._document, self._left_out = document, left_out
        self.operations = tuple(self._operations())

    def make(self, random: Random, schema: Any, mark: str, depth: int = 0) -> Any:
        """Return a value that mostly satisfies ``schema``. Some texts contain ``mark``."""
        while "$ref" in schema:
            part: Any = self._document
            for name in schema["$ref"].removeprefix("#/").split("/"):
                part = part[name]
            schema = part
        if random.random() < 0.03 or depth > _MOST_DEPTH:
            return value(random, 1)
        for choice in ("anyOf", "oneOf", "allOf"):
            if choice in schema:
                return self.make(random, random.choice(schema[choice]), mark, depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return random.choice(schema["enum"])
        kind = schema.get("type")
        match random.choice(kind) if isinstance(kind, list) else kind:
            case "object":
                return self._object(random, schema, mark, depth)
            case "array":
                count = random.choice((schema.get("minItems", 0), 1, 1, 2, 5))
                return [self.make(random, schema.get("items", {}), mark, depth + 1) for _ in range(count)]
            case "integer":
                return random.choice((schema.get("minimum", 0), schema.get("maximum", 3), 1, 2, random.randrange(100)))
            case "number":
                return random.choice((schema.get("minimum", 0), schema.get("maximum", 1), 0.5, random.random()))
            case "boolean":
                return random.random() < 0.5
            case "null":
                return None
            case "string":
                return random.choice((f"say {mark}", "a", "", str(scalar(random))))
        return value(random, 2)

    def _object(self, random: Random, schema: Any, mark: str, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        many = random.choice((0.05, 0.15, 0.4))
        made = {
            name: self.make(random, part, mark, depth + 1)
            for name, part in schema.get("properties", {}).items()
            if name in required or random.random() < many
        }
        others = schema.get("additionalProperties")
        if isinstance(others, dict) and random.random() < 0.7:
            made |= {str(random.randrange(3000)): self.make(random, others, mark, depth + 1)}
        return made

    def _operations(self) -> Iterator[Operation]:
        for path, methods in self._document["paths"].items():
            if path in self._left_out:
                continue
            for method, described in methods.items():
                content = described.get("requestBody", {}).get("content", {})
                queries = tuple(each["name"] for each in described.get("parameters", ()) if each["in"] == "query")
                yield Operation(method.upper(), path, content.get("application/json", {}).get("schema"), queries)
