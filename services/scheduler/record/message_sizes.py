"""Estimates of the size of messages from the lengths of their arrays.

For a plan without admissions this takes 1 us. ``ByteSize`` serializes, so it takes longer for a plan with many prompts.
"""

from google.protobuf.message import Message

_ELEMENT_BYTES = 4  # every array is of fixed32 or float; a character has at most 4 bytes
_MESSAGE_BYTES = 256  # approximate size of a message without its arrays


def message_size(message: Message) -> int:
    """Return an upper bound on the serialized size in bytes."""
    size = _MESSAGE_BYTES
    for field, value in message.ListFields():
        if field.message_type is not None:
            size += sum([message_size(each) for each in value]) if field.is_repeated else message_size(value)
        elif field.is_repeated or field.type == field.TYPE_STRING:
            size += _ELEMENT_BYTES * len(value)
    return size
