"""Programs are composed of groups of flags, and rules stand at the flags that they restrict."""

import re

import pytest

from services.common.config import DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig
from services.common.flags import Config, Excludes, Needs

PROGRAMS = [GatewayConfig, SchedulerConfig, WorkerConfig, DeploymentConfig]


@pytest.mark.parametrize("kind", PROGRAMS)
def test_programs_are_composed_of_groups_that_extend_nothing(kind):
    """Otherwise a group could replace a flag or a check of another one."""
    groups = [each for each in kind.__mro__[1:] if issubclass(each, Config) and each is not Config]
    assert all(group.__bases__ == (Config,) for group in groups)
    defined = [
        name for each in (kind, *groups) for name in vars(each) if re.match("_[a-z]", name) and name != "_abc_impl"
    ]
    assert sorted(set(defined)) == sorted(defined)


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_flag_of_several_groups_is_the_same_in_all(kind):
    for group in kind.__bases__:
        for name, field in group.model_fields.items():
            assert repr(kind.model_fields[name]) == repr(field)


def test_rules_name_flags_of_the_programs():
    every = {name for kind in PROGRAMS for name in kind.model_fields}
    for kind in PROGRAMS:
        for field in kind.model_fields.values():
            for rule in field.metadata:
                named = rule.names if isinstance(rule, (Needs, Excludes)) else ()
                assert {*named, *(rule.values if isinstance(rule, Excludes) else ())} <= every
