"""Every spelling of flags on a command line."""

import pytest

from services.common.config import DeploymentConfig, GatewayConfig, WorkerConfig
from services.common.flags import FlagError, asks_for_help, load
from services.launcher.ping import PingConfig
from services.launcher.run_batch import RunBatchConfig


@pytest.mark.parametrize(
    "arguments",
    [
        ["page_size=32", "prefix_caching=F"],
        ["--page_size=32", "--prefix_caching=F"],
        ["--page-size=32", "--prefix-caching=F"],
        ["--page-size", "32", "--prefix-caching", "F"],
        ["--page_size", "32", "--no-prefix-caching"],
        ["--no_prefix_caching", "page_size=32"],
    ],
    ids=" ".join,
)
def test_every_spelling_of_a_flag_means_the_same(arguments):
    config = load(DeploymentConfig, ["log_prompts=T", *arguments], {})
    assert (config.page_size, config.prefix_caching, config.log_prompts) == (32, False, True)


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["--watchdog"], True),
        (["--watchdog", "F"], False),
        (["--watchdog", "port=1"], True),
        (["--no-watchdog"], False),
    ],
    ids=str,
)
def test_a_boolean_may_be_given_without_a_value(arguments, value):
    assert load(GatewayConfig, arguments, {}).watchdog is value


def test_a_boolean_that_may_be_auto_takes_auto_as_its_value():
    assert load(WorkerConfig, ["--torch-compile", "auto", "--use-cudagraphs"], {}).use_cudagraphs is True


def test_a_value_may_begin_with_a_dash_or_hold_an_equals_sign():
    assert load(PingConfig, ["--prompt", "-1 + 1 = ?", "--model", "help"], {}).prompt == "-1 + 1 = ?"
    assert not asks_for_help(["--model", "help"])
    assert asks_for_help(["--https", "--help"])


def test_flags_of_other_programs_are_spelt_alike():
    assert load(DeploymentConfig, ["--uvicorn-log-level", "warning"], {}).gateway_log_level == "WARNING"


def test_positional_arguments_and_flags_may_be_mixed():
    config = load(RunBatchConfig, ["--model", "/models/M", "in.jsonl", "--retry-failed", "out.jsonl", "port=1"], {})
    assert (config.input, config.output, config.model, config.retry_failed) == (
        "in.jsonl",
        "out.jsonl",
        "/models/M",
        True,
    )


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (WorkerConfig, ["--model"], "'--model' has no value: write --model VALUE or model=VALUE"),
        (WorkerConfig, ["--model", "--page-size", "16"], "'--model' has no value"),
        (WorkerConfig, ["--no-model"], "--no-model: flag model is no boolean; write --model VALUE"),
        (WorkerConfig, ["--modle", "x"], "unknown flag 'modle'.*did you mean model="),
        (WorkerConfig, ["--page-size", "16", "page_size=32"], "flag 'page_size' is given twice"),
        (RunBatchConfig, ["a", "b", "/x/y"], "'/x/y' is not a flag"),
        (RunBatchConfig, ["a"], "flag output is missing: write output=VALUE"),
    ],
)
def test_a_wrong_option_is_named(kind, arguments, message):
    with pytest.raises(FlagError, match=message):
        load(kind, arguments, {})
