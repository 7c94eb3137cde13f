"""Write ``docs/reference``: flags, HTTP and gRPC, from the code. Run ``make reference`` after a change of these;
``tests/docs/test_reference.py`` compares the pages with it.

Flags come from the configs, HTTP from the application's own ``/openapi.json``, gRPC from the contracts and their
comments.
"""

import asyncio
import re
import runpy
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet
from pydantic.fields import FieldInfo

from services.common.config import (
    DeploymentConfig,
    GatewayConfig,
    GrpcFlags,
    SchedulerConfig,
    ServiceFlags,
    WorkerConfig,
)
from services.common.config.deployment import DeploymentFlags
from services.common.config.original import ORIGINAL
from services.common.flags import as_text
from services.gateway.app.app import make_app
from services.gateway.batch.service import BatchService
from services.gateway.console.observer import Observer
from services.gateway.engine.session import Timings
from services.gateway.openai.gateway import Gateway

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "reference"
MADE = "<!-- Made by docs/reference.py (make reference). -->\n"
_PROGRAMS = {"gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig}
_METHODS = ("get", "post", "put", "delete")
_SCHEMAS = "#/components/schemas/"
_OF_FIELDS = ("field", "type", "default", "meaning")
_ABOUT_FLAGS = """\
`flag=value`, `--flag=value` or `--flag value` on the command line, or `TOKA_<FLAG>` in the environment.
[Flags](../flags.md) explains the important ones.
`toka` takes the flags of all programs except addresses and ranks, which it chooses.
"""
_ABOUT_HTTP = """\
Every path, from the server's `/openapi.json`. [The APIs](../api.md) explains requests, responses and
errors. Paths of the [console](../observability.md#the-console) and HEAD are left out.
"""
_ABOUT_GRPC = {
    "common": "Messages that the contracts of [schedulers](scheduler.v1.md) and [workers](worker.v1.md) share.",
    "scheduler": "[Clients over gRPC](../grpc.md) explains how to write a client.",
    "worker": "The contract between a scheduler and its workers. [Architecture](../architecture.md) explains it.",
}


def pages() -> dict[str, str]:
    """Return every page by its file name."""
    return {
        "flags.md": flags_page(),
        "http.md": http_page(),
        "common.v1.md": grpc_page("common"),
        "scheduler.v1.md": grpc_page("scheduler"),
        "worker.v1.md": grpc_page("worker"),
    }


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += ["|" + "|".join(f" {_cell(each)} " if each else " " for each in row) + "|" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return the text of a cell, with characters escaped that would end the cell or begin a tag."""
    parts = text.replace("|", "\\|").split("`")
    plain = (re.sub(r"<(?=[a-z/])", "&lt;", part) if index % 2 == 0 else part for index, part in enumerate(parts))
    return "`".join(plain)


# Flags


def flags_page() -> str:
    """Return the page with every flag of every program."""
    every = {name: kind for kind in (*_PROGRAMS.values(), DeploymentConfig) for name in kind.model_fields}
    common = ServiceFlags.model_fields.keys() | GrpcFlags.model_fields.keys()
    groups = {"All programs": [name for name in DeploymentConfig.model_fields if name in common]}
    for program, kind in _PROGRAMS.items():
        groups[program.capitalize()] = [name for name in kind.model_fields if name not in common]
    groups["`toka` itself"] = list(DeploymentFlags.model_fields)
    schemas = {kind: kind.model_json_schema()["properties"] for kind in every.values()}
    text = f"{MADE}# Flags\n\n{_ABOUT_FLAGS}"
    for title, names in groups.items():
        rows = [_flag_row(name, every[name].model_fields[name], schemas[every[name]][name]) for name in names]
        text += f"\n## {title}\n\n" + table(("flag", "default", "values", "meaning"), rows)
    others = [(f"`{name}`", each.meaning) for name, each in ORIGINAL.items()]
    return (
        text + "\n## Of the original Tokasaurus\n\n" + table(("flag", "counterpart, or what happens instead"), others)
    )


def _flag_row(name: str, field: FieldInfo, schema: Mapping[str, Any]) -> tuple[str, ...]:
    default = as_text(field.get_default())
    values = _kind(schema).replace("boolean", "`T`, `F`").replace("list of ", "comma-separated: ")
    return f"`{name}`", f"`{default}`" if default else "", values, field.description or ""


# HTTP


def http_page() -> str:
    """Return the page with every path and the fields of its body."""
    document = asyncio.run(_document())
    text = f"{MADE}# HTTP\n\n{_ABOUT_HTTP}\n"
    operations = [
        (path, method, each[method])
        for path, each in document["paths"].items()
        for method in _METHODS
        if method in each
    ]
    text += table(
        ("request", "what it does"),
        [(f"`{method.upper()} {path}`", _first(operation["description"])) for path, method, operation in operations],
    )
    for path, method, operation in operations:
        if fields := list(_fields(operation)):
            text += f"\n## {method.upper()} {path}\n\n{table(_OF_FIELDS, fields)}"
    text += "\n## Objects in bodies\n"
    objects: dict[str, str] = {}
    for name, schema in document["components"]["schemas"].items():
        fields = table(_OF_FIELDS, _properties(schema))
        if objects.setdefault(_short(name), fields) != fields:
            raise ValueError(f"{name}: another object has its short name; give one of the classes another one")
    return text + "".join(f"\n### {name}\n\n{fields}" for name, fields in objects.items())


async def _document() -> dict[str, Any]:
    gateway = Gateway.make(GatewayConfig(), Timings())
    app = make_app(gateway, BatchService(gateway), Observer(gateway.fleet))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        return (await client.get("/openapi.json")).json()


def _fields(operation: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for parameter in operation.get("parameters", ()):
        yield f"`{parameter['name']}` (in the {parameter['in']})", _kind(parameter["schema"]), "", ""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield from _properties(content["schema"])


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    needed = schema.get("required", ())
    for name, each in schema.get("properties", {}).items():
        default = each.get("default")
        shown = "required" if name in needed else "" if default in (None, []) else f"`{default}`"
        yield f"`{name}`", _kind(each), shown, _description(each)


def _description(schema: Mapping[str, Any]) -> str:
    if "description" in schema:
        return _first(schema["description"])
    return next((_first(each["description"]) for each in schema.get("anyOf", ()) if "description" in each), "")


def _first(docstring: str) -> str:
    """Return the first paragraph, with Markdown's marks for code."""
    return " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a JSON Schema in words."""
    if "anyOf" in schema:
        kinds = [_kind(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds)) or "null"
    if "$ref" in schema:
        name = _short(schema["$ref"].removeprefix(_SCHEMAS))
        return f"[{name}](#{name.lower()})"
    if "oneOf" in schema:
        return " or ".join(_kind(each) for each in schema["oneOf"])
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]) if value is not None)
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_kind(schema['items'])}" if schema.get("items") else "list"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return (kind or "any") + _range(schema)


def _short(name: str) -> str:
    """Return the name of an object without that of its body, because bodies share objects."""
    return name.rpartition(".")[2]


def _range(schema: Mapping[str, Any]) -> str:
    # Pydantic's own words stand where a value may also be null.
    low, high = schema.get("minimum", schema.get("ge")), schema.get("maximum", schema.get("le"))
    above, below = schema.get("exclusiveMinimum", schema.get("gt")), schema.get("exclusiveMaximum", schema.get("lt"))
    bounds = [
        f"{sign} {_number(bound)}"
        for sign, bound in ((">=", low), (">", above), ("<=", high), ("<", below))
        if bound is not None
    ]
    if (most := schema.get("maxLength")) is not None:
        bounds.append(f"at most {most} characters")
    return f", {', '.join(bounds)}" if bounds else ""


def _number(value: float) -> str:
    whole = int(value)
    if abs(whole) >= 2**31 and abs(whole).bit_count() == 1:
        return f"{'-' if whole < 0 else ''}2^{abs(whole).bit_length() - 1}"
    return str(whole if value == whole else value)


# gRPC


def grpc_page(package: str) -> str:
    """Return the page of ``tokasaurus.<package>.v1``: calls, messages and enums with their comments."""
    files = [each for each in _contracts().file if each.package == f"tokasaurus.{package}.v1"]
    text = f"{MADE}# tokasaurus.{package}.v1\n\n{_ABOUT_GRPC[package]}\n"
    text += f"The meanings are the comments in [the contract](../../protos/tokasaurus/{package}/v1).\n"
    for file in files:
        notes = _Comments(file.source_code_info.location)
        text += f"\n## {Path(file.name).name}\n\n{notes.of((12,))}\n"
        for index, service in enumerate(file.service):
            rows = [
                (
                    f"`{call.name}`",
                    _stream(call.client_streaming) + _link(call.input_type),
                    _stream(call.server_streaming) + _link(call.output_type),
                    notes.of((6, index, 2, number)),
                )
                for number, call in enumerate(service.method)
            ]
            text += f"\n### {service.name}\n\n{notes.of((6, index))}\n\n" + table(
                ("call", "takes", "answers", "meaning"), rows
            )
        for index, message in enumerate(file.message_type):
            text += _message(message, notes, (4, index))
        for index, enum in enumerate(file.enum_type):
            text += _enum(enum, notes, (5, index))
    return re.sub(r"\n{3,}", "\n\n", text)


def _contracts() -> FileDescriptorSet:
    """Return all contracts with their comments, which the committed descriptor set lacks."""
    compiler = runpy.run_path(str(ROOT / "protos" / "generate.py"))
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "contracts.binpb"
        compiler["run_protoc"](f"--descriptor_set_out={target}", "--include_source_info")
        return FileDescriptorSet.FromString(target.read_bytes())


class _Comments:
    """Return the comments of one file by the path of their element."""

    def __init__(self, locations: Sequence[Any]) -> None:
        self._found = {
            tuple(each.path): each.leading_comments + each.trailing_comments
            for each in locations
            if each.leading_comments or each.trailing_comments
        }

    def of(self, path: tuple[int, ...]) -> str:
        return " ".join(self._found.get(path, "").split())


def _message(message: DescriptorProto, notes: _Comments, path: tuple[int, ...], owner: str = "") -> str:
    name = f"{owner}{message.name}"
    text = f"\n### {name}\n\n{notes.of(path)}\n"
    rows = [
        (str(field.number), f"`{field.name}`", _field_kind(field, message), notes.of((*path, 2, index)))
        for index, field in enumerate(message.field)
    ]
    if rows:
        text += "\n" + table(("no.", "field", "type", "meaning"), rows)
    for index, each in enumerate(message.nested_type):
        text += _message(each, notes, (*path, 3, index), f"{name}.")
    for index, each in enumerate(message.enum_type):
        text += _enum(each, notes, (*path, 4, index), f"{name}.")
    return text


def _enum(enum: EnumDescriptorProto, notes: _Comments, path: tuple[int, ...], owner: str = "") -> str:
    rows = [
        (str(value.number), f"`{value.name}`", notes.of((*path, 2, index))) for index, value in enumerate(enum.value)
    ]
    return f"\n### {owner}{enum.name}\n\n{notes.of(path)}\n\n" + table(("no.", "value", "meaning"), rows)


def _field_kind(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    named = field.type in (FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.TYPE_ENUM)
    kind = _link(field.type_name) if named else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {kind}"
    if field.proto3_optional:
        return f"optional {kind}"
    return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`" if field.HasField("oneof_index") else kind


def _link(full_name: str) -> str:
    """Return a link to the heading of a message or enum on its package's page."""
    package, _, name = full_name.removeprefix(".").partition(".v1.")
    if not package.startswith("tokasaurus."):
        return f"`{full_name.removeprefix('.')}`"
    return f"[{name}]({package.removeprefix('tokasaurus.')}.v1.md#{name.lower().replace('.', '')})"


def _stream(streams: bool) -> str:
    return "stream of " if streams else ""


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    for name, text in pages().items():
        (TARGET / name).write_text(text)


if __name__ == "__main__":
    main()
