"""The committed descriptor set is the contract that clients were built against."""

import importlib.util
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from tests.contracts.compatibility import breaking_changes

PROTOS = Path(__file__).parents[2] / "protos"


@pytest.fixture(scope="session")
def committed() -> FileDescriptorSet:
    return FileDescriptorSet.FromString((PROTOS / "descriptors.binpb").read_bytes())


@pytest.fixture
def current(tmp_path: Path) -> FileDescriptorSet:
    spec = importlib.util.spec_from_file_location("generate", PROTOS / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    generate.write_descriptor_set(tmp_path / "now.binpb")
    return FileDescriptorSet.FromString((tmp_path / "now.binpb").read_bytes())


def test_the_contracts_break_no_client(committed, current):
    assert breaking_changes(committed, current) == []


def test_the_committed_descriptor_set_is_up_to_date(committed, current):
    assert committed == current, (
        "a contract changed: run `make descriptors` and commit protos/descriptors.binpb with it"
    )


def _file(descriptors: FileDescriptorSet, name: str):
    return next(file for file in descriptors.file if file.name.endswith(name))


def _message(descriptors: FileDescriptorSet, file: str, name: str):
    return next(message for message in _file(descriptors, file).message_type if message.name == name)


def _field(descriptors: FileDescriptorSet, file: str, message: str, name: str):
    return next(field for field in _message(descriptors, file, message).field if field.name == name)


def _remove_a_field(descriptors):
    del _message(descriptors, "sampling.proto", "Sampling").field[2]


def _remove_and_reserve_a_field(descriptors):
    message = _message(descriptors, "sampling.proto", "Sampling")
    number = message.field[2].number
    del message.field[2]
    message.reserved_range.add(start=number, end=number + 1)


def _renumber_a_field(descriptors):
    _field(descriptors, "plan.proto", "StepPlan", "trace_id").number = 99


def _rename_a_field(descriptors):
    _field(descriptors, "plan.proto", "StepPlan", "trace_id").name = "span_id"


def _retype_a_field(descriptors):
    _field(descriptors, "plan.proto", "Admission", "slot").type = FieldDescriptorProto.TYPE_UINT64


def _repeat_a_field(descriptors):
    _field(descriptors, "plan.proto", "Admission", "slot").label = FieldDescriptorProto.LABEL_REPEATED


def _make_a_field_required_by_presence(descriptors):
    _field(descriptors, "sampling.proto", "Sampling", "top_p").proto3_optional = False


def _move_a_field_out_of_its_oneof(descriptors):
    _field(descriptors, "generate.proto", "GenerateRequest", "text").ClearField("oneof_index")


def _remove_a_message(descriptors):
    del _file(descriptors, "observe.proto").message_type[0]


def _reuse_an_enum_value(descriptors):
    _file(descriptors, "generate.proto").enum_type[0].value[1].name = "SOMETHING_ELSE"


def _remove_an_enum_value(descriptors):
    del _file(descriptors, "generate.proto").enum_type[0].value[1]


def _remove_a_method(descriptors):
    del _file(descriptors, "scheduler.proto").service[0].method[0]


def _change_the_streaming_of_a_method(descriptors):
    _file(descriptors, "scheduler.proto").service[0].method[0].server_streaming = False


def _change_the_answer_of_a_method(descriptors):
    _file(descriptors, "scheduler.proto").service[0].method[0].output_type = ".other"


@pytest.mark.parametrize(
    "change",
    [
        _remove_a_field,
        _remove_and_reserve_a_field,
        _renumber_a_field,
        _rename_a_field,
        _retype_a_field,
        _repeat_a_field,
        _make_a_field_required_by_presence,
        _move_a_field_out_of_its_oneof,
        _remove_a_message,
        _reuse_an_enum_value,
        _remove_an_enum_value,
        _remove_a_method,
        _change_the_streaming_of_a_method,
        _change_the_answer_of_a_method,
    ],
)
def test_a_breaking_change_is_found(committed, change):
    changed = FileDescriptorSet()
    changed.CopyFrom(committed)
    change(changed)
    assert breaking_changes(committed, changed)


def test_a_message_may_move_to_a_file_that_its_own_imports_publicly(committed):
    """The encoding stays, and so do the names in the stubs of most languages."""
    before, hidden = FileDescriptorSet(), FileDescriptorSet()
    before.CopyFrom(committed)
    hidden.CopyFrom(committed)
    generate, sampling = _file(before, "generate.proto"), _file(before, "sampling.proto")
    generate.message_type.extend(sampling.message_type)
    del generate.public_dependency[:], sampling.message_type[:]
    for file in before.file:
        for message in file.message_type:
            for field in message.field:
                if file.package == generate.package:
                    field.type_name = field.type_name.replace(sampling.package, generate.package)
    assert not [problem for problem in breaking_changes(before, committed) if generate.package in problem]
    del _file(hidden, "generate.proto").public_dependency[:]
    assert f"{generate.package}.Sampling was removed" in breaking_changes(before, hidden)


def test_additions_are_allowed(committed):
    changed = FileDescriptorSet()
    changed.CopyFrom(committed)
    _message(changed, "sampling.proto", "Sampling").field.add(name="new", number=100, type=1, label=1)
    _file(changed, "generate.proto").enum_type[0].value.add(name="NEW", number=100)
    _file(changed, "observe.proto").message_type.add(name="New")
    assert breaking_changes(committed, changed) == []
