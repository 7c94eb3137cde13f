"""The number of gateways, and the table of settings that a deployment prints."""

import shlex

import pytest

from services.common.config import DeploymentConfig
from services.common.flags import load
from services.launcher.settings import Setting, choose_gateways, describe, hydragen_setting
from tokasaurus.worker.v1 import worker_pb2

WORKER = [
    Setting("kv_cache_num_tokens", "4096", "a reason"),
    Setting("use_cudagraphs", "F", "only GPUs have CUDA graphs"),
    Setting("cudagraph_max_size", "32", "only GPUs have CUDA graphs"),
]


@pytest.mark.parametrize(
    ("flags", "has_gpus", "processors", "count"),
    [
        ([], True, 16, 4),
        ([], True, 2, 1),
        (["dp_size=2"], True, 32, 8),
        ([], False, 64, 1),
        (["device=cpu"], True, 64, 1),
        (["api_keys_file=keys.toml"], True, 64, 1),
        (["api_keys_file=keys.toml", "gateways=3"], True, 64, 3),
        (["gateways=0"], True, 64, 0),
    ],
    ids=str,
)
def test_gateways_get_the_processors_that_others_leave(flags, has_gpus, processors, count):
    found, reason = choose_gateways(load(DeploymentConfig, flags, {}), has_gpus=has_gpus, processors=processors)
    assert found == count
    assert reason


@pytest.mark.parametrize(
    "flags", [[], ["hydragen_min_group_size=129"], ["piecewise_cudagraph_max_tokens=0"], ["max_seqs_per_forward=64"]]
)
def test_the_printed_command_is_accepted_and_names_what_was_chosen(flags):
    config = load(DeploymentConfig, flags, {})
    rows = [*WORKER, hydragen_setting(config, worker_pb2.WorkerInfo()), Setting("gateways", "1", "a reason")]
    printed = describe(config, rows, "cpu")
    assert all(each.reason in printed for each in rows)
    [command] = [line for line in printed.splitlines() if line.startswith("The same again: toka ")]
    again = load(DeploymentConfig, shlex.split(command.removeprefix("The same again: toka ")), {})
    assert (again.kv_cache_num_tokens, again.use_hydragen, again.gateways) == (4096, False, 1)


def test_no_password_is_printed():
    config = load(DeploymentConfig, [], {"TOKA_STORE_URL": "postgresql://user:secret@host/files"})
    assert "secret" not in describe(config, WORKER, "cpu")
