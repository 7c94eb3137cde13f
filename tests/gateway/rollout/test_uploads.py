"""New weights in the body of a request, at two schedulers. Fake workers read the first byte of the tensor "norm"."""

import asyncio
import json
import socket
from contextlib import AsyncExitStack
from types import SimpleNamespace
from urllib.parse import urlsplit

import grpc
import httpx
import numpy as np
import pytest
import safetensors.numpy

from services.common.errors import FailedPrecondition, InvalidRequest, Unavailable
from services.gateway.rollout import control
from services.gateway.rollout.safetensors_body import CHUNK_BYTES, SafetensorsBody
from tests.gateway.deployment import PATIENCE_S, eventually
from tests.gateway.rollout.conftest import get, post, reasons, streamed
from tests.gateway.rollout.test_weights import SEEDED, expected
from tokasaurus.scheduler.v1 import control_pb2 as c
from tokasaurus.scheduler.v1 import scheduler_pb2_grpc

URL = "/weights?weight_version="
MESSAGES = 50  # of an upload to ``Scheduler``


def file(number: int, elements: int = 100, name: str = "norm") -> bytes:
    """Return a safetensors file that a fake worker reads as the weights ``number``."""
    content = bytes([number]) + bytes(4 * elements - 1)
    return safetensors.numpy.save({name: np.frombuffer(content, dtype=np.float32)})


def put(deployment, path: str, content, **given) -> httpx.Response:
    return httpx.put(deployment.url + path, content=content, timeout=PATIENCE_S, **given)


def versions(deployment) -> list[str]:
    return [each["version"] for each in get(deployment, "/weights")["schedulers"]]


def parts(content: bytes, size: int):
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("size", [7, 8, 1000, None])
def test_an_upload_reaches_all_workers_however_the_body_is_divided(trained, size):
    number = 40 + (size or 0) % 5
    content = file(number) if size is None else parts(file(number), size)
    told = put(trained, f"{URL}step-{number}", content)
    assert (told.status_code, told.json()["weight_version"]) == (200, f"step-{number}"), told.text
    assert versions(trained) == [f"step-{number}"] * 2
    assert all("/uploads/" in each["directory"] for each in get(trained, "/weights")["schedulers"])
    [choice] = trained.complete(**SEEDED, max_tokens=8).json()["choices"]
    assert choice["weights"] == [{"version": f"step-{number}", "tokens": 8}]
    assert choice["token_ids"] == expected(number, 8)


def test_a_body_may_be_larger_than_other_bodies(trained):
    content = file(3, elements=9 * 2**20)  # 36 MiB
    assert len(content) > 2**25  # the default of max_body_bytes
    assert put(trained, f"{URL}large", content).status_code == 200
    assert versions(trained) == ["large"] * 2


def test_an_upload_may_end_all_requests(trained):
    body = {"prompt": "Hi", "n": 2, "max_tokens": 1500, "ignore_eos": True}
    upload = f"{URL}x&abort_all_requests=true"
    events = streamed(trained, "/v1/completions", body, lambda _: put(trained, upload, file(4)))
    assert reasons(events) == ["abort"] * 2
    assert get(trained, "/is_paused") == {"is_paused": False}


def test_an_upload_with_abort_all_requests_leaves_a_pause_of_the_caller(trained):
    post(trained, "/pause?mode=keep")
    assert put(trained, f"{URL}x&abort_all_requests=true", file(4)).status_code == 200
    assert get(trained, "/is_paused") == {"is_paused": True}


def header_of(length: int, text: bytes = b"{}") -> bytes:
    return length.to_bytes(8, "little") + text


def shaped(*shape: int) -> bytes:
    """A file whose only tensor has no bytes."""
    text = json.dumps({"norm": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    return header_of(len(text), text)


GOOD = file(9)
WRONG = {
    "no version": ("/weights", GOOD, "weight_version", "name the new weights"),
    "empty version": (URL, GOOD, "weight_version", "name the new weights"),
    "long version": (f"{URL}{'x' * 257}", GOOD, "weight_version", "1 to 256"),
    "flag": (f"{URL}x&abort_all_requests=7", GOOD, "abort_all_requests", "true or false"),
    "no body": (f"{URL}x", b"", None, "not a safetensors file"),
    "json": (f"{URL}x", b'{"model_path": "/weights/1"}', None, "not a safetensors file"),
    "short header": (f"{URL}x", header_of(100), None, "ends after 2 of the 100"),
    "no json": (f"{URL}x", header_of(2, b"{]"), None, "not a safetensors file"),
    "a list": (f"{URL}x", header_of(2, b"[]"), None, "not a safetensors file"),
    "no dtype": (f"{URL}x", header_of(10, b'{"a":  {}}'), None, "not a safetensors file"),
    "large number": (f"{URL}x", shaped(0, 2**64), None, "2^63"),
    "long header": (f"{URL}x", header_of(2**40), None, "not a safetensors file"),
    "truncated": (f"{URL}x", GOOD[:-1], None, "norm: the body ends after 399 of its 400 bytes"),
    "too long": (f"{URL}x", GOOD + b"x", None, "after the last tensor"),
    "other tensor": (f"{URL}x", file(9, name="other"), None, "other has no place"),
    "large other tensor": (f"{URL}x", file(9, 2**21, name="other"), None, "other has no place"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_upload_names_what_is_wrong_and_changes_nothing(trained, wrong):
    path, content, param, text = WRONG[wrong]
    put(trained, f"{URL}before", file(8))
    before = get(trained, "/weights")
    refused = put(trained, path, content)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], text in error["message"]) == (400, param, True), refused.text
    assert get(trained, "/weights") == before
    assert get(trained, "/is_paused") == {"is_paused": False}


def test_an_upload_whose_client_leaves_changes_nothing(trained):
    put(trained, f"{URL}before", file(8))
    before, disconnects = get(trained, "/weights"), trained.metric("toka_http_disconnects_total")
    url, content = urlsplit(trained.url), file(9, elements=2**20)
    with socket.create_connection((url.hostname, url.port)) as client:
        head = f"PUT {URL}left HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        client.sendall(head.encode() + content[: 3 * 2**20])
    eventually(lambda: trained.metric("toka_http_disconnects_total") == disconnects + 1)
    assert get(trained, "/weights") == before
    assert put(trained, f"{URL}after", file(7)).status_code == 200
    assert versions(trained) == ["after"] * 2


def test_a_client_that_expects_100_continue_gets_an_error_before_it_sends_its_body(trained):
    url = urlsplit(trained.url)
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE_S) as client:
        client.sendall(b"PUT /weights HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_pickles_of_sglang_are_refused_and_the_error_names_alternatives(trained):
    path = "/update_weights_from_tensor"
    refused = httpx.post(trained.url + path, json={"serialized_named_tensors": ["x" * 10**6]}, timeout=PATIENCE_S)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "unsupported_parameter")
    alternatives = "PUT /weights", "UploadWeights", "/update_weights_from_disk", "/update_weights_from_distributed"
    assert all(each in error["message"] for each in (path, *alternatives))


async def messages_of(content: bytes, size: int) -> list[c.UploadWeightsRequest]:
    async def body():
        for part in parts(content, size):
            yield part
        yield b""

    return [message async for message in SafetensorsBody(body()).messages("v")]


async def test_tensors_are_sent_in_chunks_of_limited_size():
    tensors = {"a": np.arange(CHUNK_BYTES, dtype=np.uint16), "b": np.zeros((0, 3), np.float32), "c": np.float64([1, 2])}
    header, *chunks = await messages_of(safetensors.numpy.save(tensors), 100_000)
    described = {each.name: (each.dtype, tuple(each.shape)) for each in header.header.tensors}
    assert described == {"a": ("U16", (CHUNK_BYTES,)), "b": ("F32", (0, 3)), "c": ("F64", (2,))}
    for name, tensor in tensors.items():
        own = [each.chunk for each in chunks if each.chunk.name == name]
        assert b"".join(each.data for each in own) == tensor.tobytes()
        assert [each.offset for each in own] == [*range(0, tensor.nbytes, CHUNK_BYTES)]


async def test_a_header_with_values_of_wrong_types_is_refused():
    for described in ({"a": 1}, {"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 12]}}, {"a": {"dtype": []}}):
        text = json.dumps(described).encode()
        with pytest.raises(InvalidRequest, match="not a safetensors file"):
            await messages_of(header_of(len(text), text), 10)


class Scheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """A scheduler that fails with ``code`` after ``most`` messages of an upload."""

    def __init__(self, code: grpc.StatusCode | None = None, most: int = 100) -> None:
        self.code, self.most = code, most
        self.staged: set[str] = set()

    async def UploadWeights(self, request_iterator, context):
        count = 0
        async for _ in request_iterator:
            if (count := count + 1) == self.most:
                break
        if self.code is not None:
            await context.abort(self.code, "it failed")
        if count == MESSAGES:  # a cancelled stream ends early
            self.staged.add("u")
        return c.StageWeightsResponse(update_id="u")

    async def LeaseUpdates(self, request, context):
        return c.LeaseUpdatesResponse()

    async def DiscardWeights(self, request, context):
        self.staged.discard(request.update_id)
        return c.DiscardWeightsResponse()


async def upload_to(*schedulers: Scheduler, count: int = MESSAGES) -> None:
    """Upload to schedulers over real connections."""

    async def messages():
        for _ in range(count):
            yield c.UploadWeightsRequest(header=c.UploadHeader(version="v" * 1000))

    async with AsyncExitStack() as opened:
        replicas = []
        for scheduler in schedulers:
            server = grpc.aio.server()
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
            address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            opened.push_async_callback(server.stop, None)
            channel = await opened.enter_async_context(grpc.aio.insecure_channel(address))
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            replicas.append(SimpleNamespace(stub=stub, address=address, scheduler_id=address, metadata=lambda: None))
        await control.upload_weights(SimpleNamespace(replicas=replicas, updating=asyncio.Lock()), messages(), "keep")


@pytest.mark.parametrize("most", [3, 100])
async def test_an_upload_that_fails_at_one_scheduler_is_kept_at_none(most):
    """If it fails in the middle, the other call is cancelled. If it fails at the end, the other update is discarded."""
    other = Scheduler()
    with pytest.raises(Unavailable, match=r"it failed|has ended"):
        await upload_to(other, Scheduler(grpc.StatusCode.UNAVAILABLE, most))
    assert other.staged == set()


async def test_a_scheduler_without_uploads_is_named():
    with pytest.raises(FailedPrecondition, match=r"upgrade it to contract 1\.13"):
        await upload_to(Scheduler(grpc.StatusCode.UNIMPLEMENTED), count=1)


async def test_a_scheduler_that_is_not_connected_is_named_before_the_body_is_read():
    replica = SimpleNamespace(stub=None, address="there", scheduler_id="")
    with pytest.raises(Unavailable, match="there is not connected"):
        await control.upload_weights(SimpleNamespace(replicas=[replica], updating=asyncio.Lock()), None, "keep")
