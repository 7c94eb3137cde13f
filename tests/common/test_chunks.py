"""Work is split into chunks of limited size."""

from services.common.chunks import chunks_by_size


def test_chunks_are_as_large_as_the_limit_allows():
    texts = ["a" * 4, "b" * 6, "c", "d" * 20, "e"]
    assert list(chunks_by_size(texts, len, 10)) == [texts[:2], texts[2:3], texts[3:4], texts[4:]]
    assert list(chunks_by_size([], len, 10)) == []
