"""Weights from memory that a trainer shares, over HTTP. The fake workers of two schedulers need "norm" and "scale"."""

import base64

import pytest

from tests.fakes.broadcasts import BAD_HANDLE
from tests.gateway.rollout.conftest import post
from tests.gateway.rollout.test_broadcasts import refused, versions

UPDATE = "/update_weights"
HANDLE = base64.b64encode(bytes(range(64))).decode()


def shared(*names: str, number: int = 1, handle: str = HANDLE, **more) -> dict:
    places = [{"GPU-1": {"handle": handle, "offset": 4 * index}} for index, _ in enumerate(names)]
    described = {"names": names, "dtype_names": ["torch.bfloat16"] * len(names), "shapes": [[number]] * len(names)}
    return {"update_info": described | {"ipc_handles": places} | more}


@pytest.fixture(autouse=True)
def _without_an_update(trained):
    """No test leaves an update that another test would continue."""
    yield
    refused(trained, UPDATE, shared("other"))


@pytest.mark.parametrize("init_info", [{}, {"backend": "ipc"}])
def test_the_calls_of_vllm_change_the_weights_at_the_last_one(trained, init_info):
    post(trained, "/init_weight_transfer_engine", json={"init_info": init_info})
    post(trained, "/start_weight_update", json={"is_checkpoint_format": True, "backend": "ipc"})
    post(trained, UPDATE, json=shared("scale"))
    post(trained, "/start_weight_update", json={"backend": "ipc"})  # forgets it
    before = versions(trained)
    response = post(trained, UPDATE, json=shared("scale", other_field=1))
    assert "update_info.other_field" in response.headers["x-toka-ignored-params"]
    post(trained, UPDATE, json=shared("norm", number=7))
    assert versions(trained) == before
    response = post(trained, "/finish_weight_update", json={"weight_version": "7"}).json()
    assert response["weight_version"] == "7"
    assert versions(trained) == ["7", "7"]


def test_an_incomplete_update_names_the_tensor(trained):
    before = versions(trained)
    post(trained, "/start_weight_update", json={"backend": "ipc"})
    post(trained, UPDATE, json=shared("norm"))
    status, error = refused(trained, "/finish_weight_update", {"weight_version": "8"})
    assert (status, "scale" in error["message"]) == (400, True)
    assert versions(trained) == before


WRONG = [
    (shared("norm", ipc_handles=None, ipc_handles_pickled="gASV"), "update_info.ipc_handles_pickled", "pickle"),
    (shared("norm", packed=True), "update_info.packed", "send false"),
    (shared("norm", ipc_handles=[]), "update_info.ipc_handles", "expected one of each"),
    (shared("norm", ipc_handles=[{}]), "update_info.ipc_handles[0]", "at least 1 item"),
    (shared("norm", handle="AAAA"), "update_info.ipc_handles", "norm has 3 bytes"),
    (shared("norm", handle="é" * 86), "update_info.ipc_handles", "norm has 0 bytes"),
    (shared("norm", ipc_handles=[{"GPU-1": {"handle": HANDLE, "offset": -1}}]), "GPU-1.offset", "0 or more"),
    (shared("norm", dtype_names=["int8"]), "update_info.dtype_names", "norm has dtype"),
    (shared("norm", dtype_names=[]), "update_info.names", "expected one of each"),
    (shared("norm", handle=base64.b64encode(BAD_HANDLE).decode()), "update_info", "norm: its handle cannot be opened"),
    (shared("other"), "update_info", "other"),
]


@pytest.mark.parametrize(("body", "field", "text"), WRONG)
def test_a_wrong_call_is_refused_and_changes_nothing(trained, body, field, text):
    before = versions(trained)
    status, error = refused(trained, UPDATE, body)
    assert (status, error["param"].endswith(field), text in error["message"]) == (400, True, True), error
    assert versions(trained) == before


def test_an_object_of_the_wrong_type_is_named(trained):
    for path, field in ((UPDATE, "update_info"), ("/init_weight_transfer_engine", "init_info")):
        status, error = refused(trained, path, {field: 3})
        assert (status, error["param"]) == (400, field), error
