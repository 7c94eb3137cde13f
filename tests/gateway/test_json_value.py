"""Values of clients in the messages of errors."""

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.openai.json_value import shown

texts = st.text(st.characters(blacklist_characters="'\""))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner) | st.dictionaries(texts, inner),
)


@given(values, st.integers(4, 80))
def test_a_value_is_shown_as_python_shows_it_up_to_a_length(value, most):
    whole = repr(value)
    assert shown(value, most) == (whole if len(whole) <= most else f"{whole[: most - 3]}...")


def test_no_more_of_a_large_text_is_looked_at_than_is_shown():
    class Large(str):
        def __repr__(self) -> str:
            raise AssertionError("all of it is looked at")

    assert shown([Large("a" * 1000)], 20) == "['aaaaaaaaaaaaaaa..."


def test_a_value_may_be_nested_however_deeply():
    value: list = []
    for _ in range(100_000):
        value = [value]
    assert shown(value, 20) == "[[[[[[[[[[[[[[[[[..."
