"""Input files, split into lines."""

import pytest

from services.gateway.batch.lines import LineTooLong, read_lines
from services.gateway.store.blobs import BLOCK_BYTES, Blobs

CONTENTS = {
    "no newline at the end": b"a\nbc",
    "empty lines": b"\n\na\n \n\nb\n\n",
    "lines across blocks": b"x" * (BLOCK_BYTES - 1) + b"\n" + b"y" * (2 * BLOCK_BYTES + 5) + b"\nz",
    "a newline at the beginning of a block": b"x" * BLOCK_BYTES + b"\ny\n",
    "short lines": b"".join(b"%d\n" % number for number in range(5000)),
}


@pytest.fixture
def blobs(tmp_path):
    opened = Blobs(str(tmp_path))
    yield opened
    opened.stop()


async def write(blobs: Blobs, content: bytes) -> None:
    writer = await blobs.create("in")
    await writer.write(content)
    await writer.close()


@pytest.mark.parametrize("content", CONTENTS.values(), ids=CONTENTS.keys())
async def test_every_line_has_its_number_and_its_place_in_the_file(blobs, content):
    await write(blobs, content)
    found = []
    async for some in read_lines(blobs, "in", len(content), 64):
        assert 1 <= len(some) <= 64
        found += some
    texts = content.split(b"\n")
    expected = [(number, text) for number, text in enumerate(texts, 1) if text.strip()]
    assert [(line.number, line.text) for line in found] == expected
    assert all(content[line.offset : line.offset + len(line.text)] == line.text for line in found)


async def test_a_line_that_is_too_long_is_named_before_all_of_it_is_read(blobs):
    await write(blobs, b"a\n" + b"x" * (3 * BLOCK_BYTES))
    with pytest.raises(LineTooLong) as caught:
        async for _ in read_lines(blobs, "in", BLOCK_BYTES // 2):
            pass
    assert caught.value.number == 2
