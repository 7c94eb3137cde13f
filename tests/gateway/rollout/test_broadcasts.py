"""Weights that a trainer broadcasts, over HTTP, at two schedulers, whose fake workers need "norm" and "scale"."""

import httpx
import pytest

from tests.gateway.deployment import PATIENCE_S
from tests.gateway.rollout.conftest import get, post

GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}
UPDATE = "/update_weights_from_distributed"


def bucket(*names: str, number: int = 1, dtypes: str = "dtypes") -> dict:
    return {"names": names, dtypes: ["torch.bfloat16"] * len(names), "shapes": [[number]] * len(names)}


def versions(trained) -> list[str]:
    return [each["version"] for each in get(trained, "/weights")["schedulers"]]


def refused(trained, path: str, body: dict) -> tuple[int, dict]:
    response = httpx.post(trained.url + path, json=body, timeout=PATIENCE_S)
    return response.status_code, response.json()["error"]


def test_buckets_of_sglang_change_the_weights_when_all_tensors_have_arrived(trained):
    assert get(trained, "/get_world_size") == {"world_size": 2}
    response = post(trained, "/init_weights_update_group", json=GROUP | {"backend": "gloo", "group_name": "g"}).json()
    assert (response["success"], "2 workers" in response["message"]) == (True, True)
    before = versions(trained)
    body = {"group_name": "g", "weight_version": "7", "flush_cache": False}
    response = post(trained, UPDATE, json=bucket("scale") | body)
    assert (response.json()["missing"], "flush_cache" in response.headers["x-toka-ignored-params"]) == (1, True)
    assert versions(trained) == before
    response = post(trained, UPDATE, json=bucket("norm", number=7) | body | {"load_format": "flattened_bucket"}).json()
    assert (response["success"], response["weight_version"]) == (True, "7")
    assert versions(trained) == ["7", "7"]
    response = [post(trained, "/destroy_weights_update_group", json={"group_name": "g"}).json() for _ in range(2)]
    assert [each["message"].startswith("no worker") for each in response] == [False, True]


def test_the_calls_of_vllm_change_the_weights_at_the_last_one(trained):
    post(trained, "/init_weight_transfer_engine", json={"init_info": GROUP})
    post(trained, "/start_weight_update", json={"is_checkpoint_format": True})
    post(trained, "/update_weights", json={"update_info": bucket("scale", dtypes="dtype_names")})
    post(trained, "/start_weight_update")  # forgets it
    post(trained, "/update_weights", json={"update_info": bucket("norm", "scale", dtypes="dtype_names")})
    before = versions(trained)
    response = post(trained, "/finish_weight_update").json()
    assert response["weight_version"].startswith("20")  # the time
    assert versions(trained) == [response["weight_version"]] * 2 != before
    post(trained, "/update_weights", json={"update_info": bucket("norm", dtypes="dtype_names")})
    status, error = refused(trained, "/finish_weight_update", {"weight_version": "8"})
    assert (status, "scale" in error["message"]) == (400, True)
    assert versions(trained) == [response["weight_version"]] * 2


WRONG = [
    ("/init_weights_update_group", GROUP | {"world_size": 2}, "world_size"),
    ("/init_weights_update_group", GROUP | {"rank_offset": 0}, "rank_offset"),
    ("/init_weights_update_group", GROUP | {"backend": "mpi"}, "backend"),
    ("/init_weight_transfer_engine", {}, "init_info"),
    ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
    ("/update_weights", {"update_info": bucket("norm", dtypes="dtype_names") | {"packed": True}}, "update_info.packed"),
    (UPDATE, bucket("norm") | {"dtypes": ["int8"]}, "dtypes"),
    (UPDATE, bucket("norm") | {"dtypes": []}, "names"),
    (UPDATE, bucket("norm") | {"load_format": "delta"}, "load_format"),
    (UPDATE, bucket("other"), "tensors"),
]


@pytest.mark.parametrize(("path", "body", "field"), WRONG)
def test_a_wrong_call_is_refused_and_changes_nothing(trained, path, body, field):
    post(trained, "/init_weights_update_group", json=GROUP)
    before = versions(trained)
    status, error = refused(trained, path, body)
    assert (status, error["param"]) == (400, field), error
    assert versions(trained) == before


def test_a_refused_bucket_closes_the_group(trained):
    for wrong in (bucket("norm") | {"dtypes": ["int8"]}, bucket("other")):
        post(trained, "/init_weights_update_group", json=GROUP)
        assert refused(trained, UPDATE, wrong)[0] == 400
        status, error = refused(trained, UPDATE, bucket("norm"))
        assert (status, "no group" in error["message"]) == (409, True)
