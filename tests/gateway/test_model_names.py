"""The names at which a model is found, over HTTP and gRPC."""

import grpc
import httpx
import openai
import pytest

from services.common.rpc.status import from_rpc_error
from tests.gateway.deployment import Deployment
from tests.gateway.test_errors import error_of
from tokasaurus.scheduler.v1 import observe_pb2, scheduler_pb2_grpc

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
BODIES = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 2},
    CHAT: {"messages": HI, "max_tokens": 2},
    "/v1/responses": {"input": "x", "max_output_tokens": 2, "store": False},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def strict(tmp_path_factory):
    """A model of two given names, and a gateway that takes no others."""
    running = Deployment(
        tmp_path_factory.mktemp("strict"),
        scheduler={"served_model_name": "llama,llama-latest"},
        gateway={"strict_model_names": "T"},
    ).wait_ready()
    yield running
    running.stop()


@pytest.mark.parametrize("path", BODIES)
def test_a_single_model_answers_under_any_name(deployment, model, path):
    for name in ("llm", "gpt-4o", "", None):
        response = deployment.post(path, BODIES[path] | {"model": name})
        assert response.status_code == 200, response.text
        assert response.json().get("model", model) == model


def test_a_stream_names_what_was_served(deployment, model):
    with deployment.sdk() as client:
        stream = client.chat.completions.create(model="llm", messages=HI, max_tokens=2, stream=True)
        assert {chunk.model for chunk in stream} == {model}


@pytest.mark.parametrize("name", ["llama", "llama-latest", "tokasaurus-builtin", "builtin", "", None])
def test_each_name_of_a_model_is_known_where_names_are_strict(strict, name):
    for path, body in BODIES.items():
        response = strict.post(path, body | {"model": name})
        assert response.status_code == 200, response.text
        assert response.json().get("model", "llama") == "llama"


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_name_is_refused_where_names_are_strict(strict, path):
    error = error_of(strict.post(path, BODIES[path] | {"model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "llama" in error["message"]


def test_a_long_name_does_not_come_back_whole(strict):
    error = error_of(strict.complete(model="m" * 1_000_000, prompt="x"), 404)
    assert len(error["message"]) < 1000


def test_models_are_listed_with_their_aliases(strict):
    [model] = httpx.get(strict.url + "/v1/models").json()["data"]
    assert (model["id"], model["root"], model["parent"]) == ("llama", "builtin", None)
    assert model["aliases"] == ["llama-latest", "tokasaurus-builtin", "builtin"]
    assert model["max_model_len"] == 2048
    with strict.sdk() as client:
        for name in ("llama", *model["aliases"]):
            assert client.models.retrieve(name).id == "llama"
            anthropic = httpx.get(f"{strict.url}/v1/models/{name}", headers={"anthropic-version": "2023-06-01"})
            assert anthropic.json()["id"] == "llama"


def test_a_model_that_is_not_served_is_not_listed(deployment):
    with deployment.sdk() as client, pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_scheduler_takes_each_name(strict):
    with grpc.insecure_channel(strict.scheduler_address) as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        for name in ("", "llama", "llama-latest", "builtin"):
            assert stub.GetModel(observe_pb2.GetModelRequest(model=name)).model.id == "llama"
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModel(observe_pb2.GetModelRequest(model="gpt-9"))
        assert from_rpc_error(caught.value).reason == "NOT_FOUND"
