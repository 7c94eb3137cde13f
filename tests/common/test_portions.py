"""Parts of what is too much at once."""

from services.common.portions import portions


def test_so_many_come_together_as_may_be():
    texts = ["a" * 4, "b" * 6, "c", "d" * 20, "e"]
    assert list(portions(texts, len, 10)) == [texts[:2], texts[2:3], texts[3:4], texts[4:]]
    assert list(portions([], len, 10)) == []
