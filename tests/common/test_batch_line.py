"""Lines of a batch file, as they are parsed."""

import json

import pytest

from services.common.batch_line import MAX_VALUES, InvalidLine, is_large, read_request


def line(**body) -> bytes:
    return json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}).encode()


def test_a_large_line_is_the_request_that_it_says():
    body = {"prompt": list(range(200_000)), "user": "ü" * 1000}
    text = line(**body)
    assert is_large(text)
    assert not is_large(line(prompt="short"))
    assert read_request(b"\xef\xbb\xbf" + text)["body"] == body


def test_a_line_with_more_values_than_are_counted_to_is_refused_before_they_are_made():
    text = line(prompt="x", unknown=[[]] * (MAX_VALUES + 1))
    with pytest.raises(InvalidLine, match=str(MAX_VALUES)) as refused:
        read_request(text)
    assert refused.value.code == "invalid_value"


def test_a_large_line_that_is_no_json_is_refused():
    with pytest.raises(InvalidLine, match="not valid JSON"):
        read_request(line(prompt="x" * 200_000)[:-1])
