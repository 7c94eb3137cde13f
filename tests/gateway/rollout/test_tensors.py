"""``/get_weights_by_name`` at two schedulers, whose fake workers have the weights N in ``/weights/N``."""

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S
from tests.gateway.rollout.conftest import post

CHUNKS = [b'{"name": "norm", ', b'"truncate_size": 3}']  # a body without content-length


def read(deployment, method: str = "POST", path: str = "/get_weights_by_name", **given) -> httpx.Response:
    return httpx.request(method, deployment.url + path, timeout=PATIENCE_S, **given)


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("POST", {"json": {"name": "norm", "truncate_size": 3}}),
        ("GET", {"json": {"name": "norm", "truncate_size": 3}}),  # as SGLang's own tests do
        ("GET", {"content": CHUNKS, "headers": {"content-type": "application/json"}}),
        ("GET", {"params": {"name": "norm", "truncate_size": "3"}}),
    ],
)
def test_the_values_of_each_scheduler_are_those_of_the_weights(trained, method, given):
    post(trained, "/update_weights_from_disk", json={"model_path": "/weights/5"})
    assert read(trained, method, **given).json() == [[5.0] * 3] * 2


def test_fewer_values_are_returned_if_there_are_no_more(trained):
    assert [len(each) for each in read(trained, json={"name": "norm"}).json()] == [8, 8]


@pytest.mark.parametrize(
    ("method", "given", "status", "field"),
    [
        ("POST", {"json": {"name": "nrm"}}, 404, "name"),
        ("POST", {"json": {}}, 400, "name"),
        ("POST", {"json": {"name": "norm", "truncate_size": 0}}, 400, "truncate_size"),
        ("POST", {"json": {"name": "norm", "truncate_size": 2000}}, 400, "truncate_size"),
        ("POST", {"json": {"name": "norm", "truncate_size": 10**9}}, 400, "truncate_size"),
        ("GET", {"params": {"name": "norm", "truncate_size": "-1"}}, 400, "truncate_size"),
        ("GET", {"params": {"name": "norm", "truncate_size": "9" * 30}}, 400, "truncate_size"),
        ("GET", {}, 400, "name"),
    ],
)
def test_a_refusal_names_the_parameter(trained, method, given, status, field):
    answer = read(trained, method, **given)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, field)


def test_weights_that_are_asleep_are_not_read(trained):
    post(trained, "/sleep")
    try:
        answer = read(trained, json={"name": "norm"})
        assert (answer.status_code, "asleep" in answer.text) == (409, True)
    finally:
        post(trained, "/wake_up")
    assert read(trained, json={"name": "norm"}).status_code == 200
