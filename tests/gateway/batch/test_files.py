"""``/v1/files`` as the official SDK calls it, and what it never sends."""

import contextlib
import http.client
import os

import httpx
import openai
import pytest

from services.gateway.batch.upload import MAX_FILE_BYTES
from tests.gateway.deployment import PATIENCE_S


def test_a_file_comes_back_as_it_was_sent(sdk):
    content = os.urandom(3_000_000)
    made = sdk.files.create(file=('ärger "1".bin', content), purpose="user_data")
    assert (made.object, made.bytes, made.filename, made.purpose) == (
        "file",
        len(content),
        'ärger "1".bin',
        "user_data",
    )
    assert (made.status, made.expires_at) == ("processed", None)
    assert sdk.files.retrieve(made.id) == made
    assert sdk.files.content(made.id).read() == content


def test_a_deleted_file_is_gone(sdk):
    made = sdk.files.create(file=b"x", purpose="batch")
    gone = sdk.files.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "file")
    for ask in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made.id)
        assert caught.value.code == "file_not_found"


def test_a_list_goes_on_where_its_last_page_ended(sdk):
    made = [sdk.files.create(file=(f"{number}.txt", b"x"), purpose="evals").id for number in range(5)]
    first = sdk.files.list(purpose="evals", limit=2)
    assert [file.id for file in first.data] == [made[4], made[3]]
    assert first.has_more
    assert [file.id for file in sdk.files.list(purpose="evals", limit=2)] == made[::-1]  # the SDK turns the pages
    assert [file.id for file in sdk.files.list(purpose="evals", order="asc", after=made[2])] == made[3:]
    assert sdk.files.list(purpose="vision").data == []


@pytest.mark.parametrize(
    ("query", "param"), [({"limit": 0}, "limit"), ({"order": "up"}, "order"), ({"after": "file-none"}, "after")]
)
def test_a_wrong_query_names_its_parameter(sdk, query, param):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.files.list(**query)
    assert caught.value.param == param


def test_files_of_batches_expire_unless_told_otherwise(sdk):
    usual = sdk.files.create(file=b"x", purpose="batch")
    assert usual.expires_at - usual.created_at == 30 * 24 * 3600
    soon = sdk.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert soon.expires_at - soon.created_at == 3600


def test_a_wrong_form_names_what_is_wrong(sdk, deployment):
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.files.create(file=b"x", purpose="fun")
    assert caught.value.param == "purpose"
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    assert caught.value.param == "expires_after[seconds]"
    url = deployment.url + "/v1/files"
    for request in (
        {"json": {"purpose": "batch"}},
        {"data": {"purpose": "batch"}, "files": {"other": b"x"}},
        {"files": {"file": b"x"}},
        {"content": b"--b\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"files": [("purpose", (None, "batch")), ("file", b"x"), ("file", b"y")]},
    ):
        answer = httpx.post(url, timeout=PATIENCE_S, **request)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(deployment):
    connection = http.client.HTTPConnection(deployment.url.removeprefix("http://"), timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/files")
        connection.putheader("content-type", "multipart/form-data; boundary=b")
        connection.putheader("content-length", str(MAX_FILE_BYTES + 2**21))
        connection.endheaders()
        assert connection.getresponse().status == 413


def test_what_came_of_a_form_that_was_refused_is_not_kept(sdk, deployment):
    before = {path.name for path in (deployment.directory / "store" / "files").iterdir()}
    with pytest.raises(openai.BadRequestError):
        sdk.files.create(file=b"x", purpose="fun")
    assert {path.name for path in (deployment.directory / "store" / "files").iterdir()} == before
