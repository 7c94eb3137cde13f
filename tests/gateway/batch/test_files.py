"""``/v1/files`` as the official SDK calls it, and what it never sends."""

import contextlib
import http.client
import os
import socket

import httpx
import openai
import pytest

from services.gateway.batch.upload import MAX_FILE_BYTES
from tests.gateway.deployment import PATIENCE_S

NUL_IN_ITS_NAME = (
    b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a\0b"\r\n\r\nx\r\n--b--\r\n'
)


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


def test_a_list_goes_on_though_its_files_are_deleted_meanwhile(sdk):
    made = [sdk.files.create(file=(f"{number}.txt", b"x"), purpose="vision").id for number in range(5)]
    met = []
    for file in sdk.files.list(purpose="vision", limit=2):
        sdk.files.delete(file.id)
        met.append(file.id)
    assert met == made[::-1]
    assert sdk.files.list(purpose="vision").data == []


def test_a_try_whose_file_was_deleted_makes_it_anew(sdk):
    asked = {"file": b"x", "purpose": "user_data", "extra_headers": {"idempotency-key": "once-deleted"}}
    made = sdk.files.create(**asked)
    sdk.files.delete(made.id)
    assert sdk.files.create(**asked).id == made.id
    assert sdk.files.content(made.id).read() == b"x"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "file-none"}, "after"),
        ({"after": "\0"}, "after"),
        ({"purpose": "batch\0"}, "purpose"),
    ],
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
    with pytest.raises(openai.BadRequestError) as caught:
        sdk.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at"})
    assert caught.value.param == "expires_after[seconds]"
    url = deployment.url + "/v1/files"
    for request in (
        {"json": {"purpose": "batch"}},
        {"data": {"purpose": "batch"}, "files": {"other": b"x"}},
        {"files": {"file": b"x"}},
        {"content": b"--b\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"files": [("purpose", (None, "batch")), ("file", b"x"), ("file", b"y")]},
        {"content": NUL_IN_ITS_NAME, "headers": {"content-type": "multipart/form-data; boundary=b"}},
    ):
        answer = httpx.post(url, timeout=PATIENCE_S, **request)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text


def test_fields_that_nobody_knows_are_told(sdk):
    create = sdk.files.with_raw_response.create
    expires = {"anchor": "created_at", "seconds": 3600}
    known = create(file=b"x", purpose="batch", expires_after=expires)
    assert "x-toka-ignored-params" not in known.headers
    assert create(file=b"x", purpose="batch", extra_body={"foo": "3"}).headers["x-toka-ignored-params"] == "foo"


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


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@contextlib.contextmanager
def form_without_end(deployment):
    """A connection that begins to send a form with the boundary b, in chunks."""
    port = int(deployment.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
        client.sendall(
            b"POST /v1/files HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n"
            b"content-type: multipart/form-data; boundary=b\r\n\r\n"
        )
        yield client


def answer_on(client: socket.socket) -> tuple[int, bytes]:
    with http.client.HTTPResponse(client) as response:
        response.begin()
        return response.status, response.read()


def test_nothing_is_read_behind_the_last_boundary(deployment):
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="f"\r\n\r\nx')
    form = b"".join(b"--b\r\ncontent-disposition: form-data; %b\r\n" % part for part in parts) + b"--b--\r\n"
    with form_without_end(deployment) as client:
        client.sendall(chunk(form))
        assert answer_on(client)[0] == 200


@pytest.mark.parametrize(
    "more", [b'--b\r\ncontent-disposition: form-data; name="x"\r\n\r\n%b\r\n' % (b"y" * 60_000), b"\r\n"]
)
def test_what_comes_beside_the_file_is_bounded(deployment, more):
    with form_without_end(deployment) as client:
        client.sendall(chunk(more * (1_200_000 // len(more))))
        status, body = answer_on(client)
    assert status == 400
    assert b"1048576 bytes beside the file" in body
