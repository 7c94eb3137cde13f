"""What ``toka`` gives its children so that they know each other."""

import stat
from pathlib import Path

import pytest

from services.common.config import ChosenDeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import load
from services.launcher.deployment import plan_children
from services.launcher.toka import _with_token
from tests.common.rpc.authority import Authority, Pair, flags

KINDS = {"worker": WorkerConfig, "scheduler": SchedulerConfig, "gateway": GatewayConfig}


def test_all_get_the_certificates_and_schedulers_are_asked_with_them(tmp_path):
    authority = Authority(tmp_path)
    given = flags(authority, authority.issue("toka"))
    children = plan_children(ChosenDeploymentConfig(**given), tmp_path)
    for child in children:
        config = load(KINDS[child.role], child.flags, {})
        assert {name: getattr(config, name) for name in given} == given
    assert [child.dialer.certificates is not None for child in children] == [False, True, False]


def test_wrong_certificates_end_the_start_before_anything_runs(tmp_path):
    authority = Authority(tmp_path)
    pair = Pair(authority.issue("one").cert, authority.issue("two").key)
    with pytest.raises(InvalidRequest, match=r"flag grpc_key=.* is not the key of grpc_cert="):
        plan_children(ChosenDeploymentConfig(**flags(authority, pair)), tmp_path)


def test_gateways_and_schedulers_share_a_secret_where_there_are_keys(tmp_path):
    config = _with_token(ChosenDeploymentConfig(api_keys_file="keys.toml"), tmp_path)
    token = Path(config.grpc_token_file)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert len(token.read_text().strip()) > 40
    worker, scheduler, gateway = plan_children(config, tmp_path)
    for child in (scheduler, gateway):
        assert load(KINDS[child.role], child.flags, {}).grpc_token_file == str(token)
    assert not any("token_file" in flag for flag in worker.flags)


def test_a_secret_of_the_operator_is_kept_and_none_is_made_without_keys(tmp_path):
    for given in ({}, {"api_keys_file": "k", "grpc_token_file": "t"}):
        config = ChosenDeploymentConfig(**given)
        assert _with_token(config, tmp_path) is config
    assert list(tmp_path.iterdir()) == []
