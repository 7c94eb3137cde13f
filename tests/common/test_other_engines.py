"""Flags of other engines are refused with the flag to use instead."""

import pytest

from services.common.config import DeploymentConfig, WorkerConfig
from services.common.config.other_engines import OTHER_ENGINES
from services.common.flags import FlagError
from services.common.flags.command_line import load


@pytest.mark.parametrize("name", OTHER_ENGINES)
def test_a_flag_of_another_engine_is_refused_with_its_counterpart(name):
    counterpart = OTHER_ENGINES[name]
    assert counterpart in DeploymentConfig.fields_by_flag()
    for arguments in ([f"--{name.replace('_', '-')}", "2"], [f"{name}=2"]):
        with pytest.raises(FlagError, match=f"unknown flag '{name}' in .*: did you mean {counterpart}=\\?$"):
            load(DeploymentConfig, ["model=builtin", *arguments], {})


def test_a_program_suggests_its_own_flags_only():
    with pytest.raises(FlagError, match=r"unknown flag .api_server_count.*(?<!did you mean gateways=\?)$"):
        load(WorkerConfig, ["model=builtin", "api_server_count=2"], {})
