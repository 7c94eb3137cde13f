"""Unexpected protobuf messages, made from descriptors."""

from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_UNSIGNED = (0, 1, 2, 15, 20, 64, 255, 2047, 2048, 65535, 65536)
_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 2.0, 100.0, 1e-40, 3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    "",
    "a",
    "\x00",
    "é🙂",
    "\u202e" * 9,
    "x" * 300,
    "tokasaurus-builtin",
    "{}",
    "[",
    "a|b",
    "start: ",
    '{"type": "object"}',
)
_COUNTS = (0, 1, 2, 3, 17, 300)
_LARGEST = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_FIXED32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
    FieldDescriptor.TYPE_FIXED64: 2**64 - 1,
    FieldDescriptor.TYPE_INT32: 2**31 - 1,
    FieldDescriptor.TYPE_INT64: 2**63 - 1,
}


def mutated(random: Random, message: Message) -> Message:
    """Return a copy of ``message`` with an unexpected value in a field, at any depth."""
    changed = type(message)()
    changed.CopyFrom(message)
    holder = random.choice(list(_messages(changed)))
    fields = holder.DESCRIPTOR.fields
    if not fields:
        return changed
    # Prefer fields that are set, since most fields have no effect on most messages.
    set_fields = [field for field, _ in holder.ListFields()]
    field = random.choice(set_fields if set_fields and random.random() < 0.6 else fields)
    if random.random() < 0.15:
        holder.ClearField(field.name)
    elif field.is_repeated:
        _mutate_list(random, holder, field)
    elif field.message_type is not None:
        part = getattr(holder, field.name)
        part.SetInParent()
        fill(random, part)
    else:
        setattr(holder, field.name, _scalar(random, field))
    return changed


def fill(random: Random, message: Message, depth: int = 2) -> None:
    """Set some fields of ``message`` to random values."""
    for field in message.DESCRIPTOR.fields:
        if random.random() < 0.5:
            continue
        if field.is_repeated:
            _mutate_list(random, message, field, depth)
        elif field.message_type is None:
            setattr(message, field.name, _scalar(random, field))
        elif depth:
            part = getattr(message, field.name)
            part.SetInParent()
            fill(random, part, depth - 1)


def damaged(random: Random, data: bytes) -> bytes:
    """Return the bytes of a message with random changes. They may be invalid."""
    changed = bytearray(data)
    kind = random.randrange(6)
    at = random.randrange(len(changed) + 1)
    if kind == 0:
        return bytes(changed[:at])
    if kind == 1:
        return bytes(changed + changed)
    if kind == 2:
        return random.randbytes(random.choice((1, 2, 10, 1000)))
    if kind == 3:  # a field with a length beyond the end of the message
        return bytes(changed[:at] + b"\x0a\xff\xff\xff\xff\x07" + changed[at:])
    if kind == 4:  # groups within groups
        return b"\x0b" * random.choice((5, 99, 101, 5000)) + bytes(changed)
    for _ in range(random.choice((1, 3))):
        if changed:
            changed[random.randrange(len(changed))] = random.randrange(256)
    return bytes(changed)


def _messages(message: Message):
    """Yield ``message`` and all messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for part in value if field.is_repeated else (value,):
                yield from _messages(part)


def _mutate_list(random: Random, holder: Message, field: FieldDescriptor, depth: int = 1) -> None:
    values = getattr(holder, field.name)
    kind = random.randrange(4)
    if kind == 0 and len(values):
        del values[random.randrange(len(values))]
    elif field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return
        for _ in range(random.choice((1, 2, 20))):
            part = values.add()
            if len(values) > 1 and random.random() < 0.5:
                part.CopyFrom(values[0])
            elif depth:
                fill(random, part, depth - 1)
    elif kind == 1 and len(values):
        values[random.randrange(len(values))] = _scalar(random, field)
    elif kind == 2 and len(values):
        values.append(values[0])  # twice
    else:
        values.extend(_scalar(random, field) for _ in range(random.choice(_COUNTS)))


def _scalar(random: Random, field: FieldDescriptor) -> Any:
    match field.type:
        case FieldDescriptor.TYPE_BOOL:
            return random.random() < 0.5
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return random.choice(_FLOATS)
        case FieldDescriptor.TYPE_STRING:
            return random.choice(_TEXTS)
        case FieldDescriptor.TYPE_BYTES:
            return random.randbytes(random.choice(_COUNTS))
        case FieldDescriptor.TYPE_ENUM:
            return random.choice((0, 1, 2, 3, 4, 99, -1, 2**31 - 1))
        case kind:
            largest = _LARGEST.get(kind, 2**31 - 1)
            return random.choice((*_UNSIGNED, largest, largest - 1, largest // 2, random.randint(0, largest)))
