"""What would break a client that was built against an older version of the contracts."""

from collections.abc import Iterator

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

Members = dict[str, DescriptorProto | EnumDescriptorProto | ServiceDescriptorProto]


def breaking_changes(old: FileDescriptorSet, new: FileDescriptorSet) -> list[str]:
    """Return each incompatible difference as a sentence. Empty if ``new`` only adds to ``old``.

    A message that a file imports publicly counts as one of the file's package. So it can move to another package.
    """
    before, after = _members(_imported(old)), _members(_imported(new))
    problems = []
    for name, member in before.items():
        if name not in after or type(after[name]) is not type(member):
            problems.append(f"{name} was removed")
            continue
        compare = {DescriptorProto: _message, EnumDescriptorProto: _enum, ServiceDescriptorProto: _service}[
            type(member)
        ]
        problems += [f"{name}.{problem}" for problem in compare(member, after[name])]
    return problems


def _imported(files: FileDescriptorSet) -> FileDescriptorSet:
    """Return ``files`` with their public imports copied into them."""
    by_name = {file.name: file for file in files.file}
    result = FileDescriptorSet()
    for file in files.file:
        copy = result.file.add()
        copy.CopyFrom(file)
        for imported in (by_name[file.dependency[index]] for index in file.public_dependency):
            copy.message_type.extend(imported.message_type)
            copy.enum_type.extend(imported.enum_type)
    for package, imported in {
        (file.package, by_name[file.dependency[index]].package)
        for file in files.file
        for index in file.public_dependency
    }:
        for message in (message for file in result.file if file.package == package for message in file.message_type):
            _rename(message, f".{imported}.", f".{package}.")
    return result


def _rename(message: DescriptorProto, imported: str, package: str) -> None:
    """Change the types of fields that are in the package ``imported`` to those of the same names in ``package``."""
    for field in message.field:
        if field.type_name.startswith(imported):
            field.type_name = package + field.type_name.removeprefix(imported)
    for inner in message.nested_type:
        _rename(inner, imported, package)


def _members(files: FileDescriptorSet) -> Members:
    found: Members = {}
    for file in files.file:
        for member in (*file.message_type, *file.enum_type, *file.service):
            _collect(f"{file.package}.{member.name}", member, found)
    return found


def _collect(name: str, member, found: Members) -> None:
    found[name] = member
    if isinstance(member, DescriptorProto):
        for inner in (*member.nested_type, *member.enum_type):
            _collect(f"{name}.{inner.name}", inner, found)


def _message(old: DescriptorProto, new: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in new.field}
    for field in old.field:
        now = fields.get(field.number)
        if now is None:
            if not any(span.start <= field.number < span.end for span in new.reserved_range):
                yield f"{field.name}: number {field.number} was removed without being reserved"
            else:
                yield f"{field.name} was removed"
            continue
        if now.name != field.name:
            yield f"{field.name} was renamed to {now.name}"
        if (now.type, now.type_name) != (field.type, field.type_name):
            yield f"{field.name} changed its type"
        if (now.label, now.proto3_optional) != (field.label, field.proto3_optional):
            yield f"{field.name} changed between single, optional and repeated"
        if _oneof(old, field) != _oneof(new, now):
            yield f"{field.name} moved into or out of a oneof"


def _oneof(message: DescriptorProto, field) -> str | None:
    if not field.HasField("oneof_index") or field.proto3_optional:
        return None
    return message.oneof_decl[field.oneof_index].name


def _enum(old: EnumDescriptorProto, new: EnumDescriptorProto) -> Iterator[str]:
    values = {value.number: value.name for value in new.value}
    for value in old.value:
        if value.number not in values:
            yield f"{value.name} was removed"
        elif values[value.number] != value.name:
            yield f"{value.name}: number {value.number} was given to {values[value.number]}"


def _service(old: ServiceDescriptorProto, new: ServiceDescriptorProto) -> Iterator[str]:
    methods = {method.name: method for method in new.method}
    for method in old.method:
        now = methods.get(method.name)
        if now is None:
            yield f"{method.name} was removed"
        elif (now.input_type, now.output_type) != (method.input_type, method.output_type):
            yield f"{method.name} changed its messages"
        elif (now.client_streaming, now.server_streaming) != (method.client_streaming, method.server_streaming):
            yield f"{method.name} changed its streaming"
