"""Flags of the original Tokasaurus: each takes effect, is refused with the reason, or says what happens instead."""

import os
import subprocess
import sys

import pytest

from services.common.config import DeploymentConfig, GatewayConfig, SchedulerConfig, WorkerConfig, usage
from services.common.config.original import ORIGINAL
from services.common.flags import FlagError, load, misspelt, notes

# Of its ServerConfig, version 0.0.4; kv_cache_size_num_tokens is of its README.
ITS_FLAGS = """
    model tokenizer trust_remote_code dtype rope_scaling use_hydragen hydragen_min_group_size hydragen_min_prefix_len
    enable_chosen_logprobs max_topk_logprobs port local_proc_name log_level log_procs uvicorn_log_level
    stats_report_seconds statsd_server_url page_size kv_cache_num_tokens torch_compile async_tp_threshold
    max_tokens_per_forward max_seqs_per_forward prefill_round_up_multiple scheduling_steps_ahead
    stop_string_num_token_lookback dp_size pp_size tp_size pp_num_buffer_stages track_early_stopping
    early_stopping_buffer_size early_stopping_num_prediction_buckets early_stopping_initial_wait
    early_stopping_init_mean early_stopping_init_std max_num_tokens_per_request enable_precise_onboard
    precise_onboard_batch_size greedy_prefill use_spec_allocation spec_allocation_std_buffer_scale
    spec_allocation_target_kv_cache_utilization use_cudagraphs cudagraph_max_size cudagraph_step
    cudagraph_max_kv_indices_per_seq allocator_sanity_checks bump_city_population_me kv_cache_size_num_tokens
""".split()  # noqa: SIM905  # fifty lines otherwise


def test_every_flag_of_the_original_is_known():
    assert set(ITS_FLAGS) <= set(DeploymentConfig.known())


def test_no_flag_of_the_original_hides_one_of_ours():
    assert not ORIGINAL.keys() & DeploymentConfig.model_fields.keys()


def test_a_command_line_of_the_original_is_accepted_as_it_is():
    line = [
        *("model=m", "kv_cache_num_tokens=(512 * 1024)", "max_seqs_per_forward=4096", "max_tokens_per_forward=32768"),
        *("torch_compile=T", "use_hydragen=T", "hydragen_min_group_size=129", "stop_string_num_token_lookback=5"),
        *("uvicorn_log_level=info", "page_size=16"),
    ]
    config = load(DeploymentConfig, line, {})
    assert (config.kv_cache_num_tokens, config.max_seqs_per_forward, config.max_tokens_per_forward) == (
        512 * 1024,
        4096,
        32768,
    )
    assert (config.use_hydragen, config.hydragen_min_group_size, config.gateway_log_level) == (True, 129, "INFO")
    assert notes(DeploymentConfig, line, {}) == [
        "flag stop_string_num_token_lookback=5 of the original Tokasaurus has no effect: stop strings of any length are"
        " found wherever they begin"
    ]


def test_the_shorthand_of_its_benchmarks_silences_the_gateways():
    assert load(DeploymentConfig, ["model=m", ".uvsh"], {}).gateway_log_level == "WARNING"


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("kv_cache_size_num_tokens=(1024 * 1024)", "kv_cache_num_tokens", 1024 * 1024),
        ("max_num_tokens_per_request=4096", "max_context_tokens", 4096),
        ("max_num_tokens_per_request=None", "max_context_tokens", None),
        ("max_topk_logprobs=5", "max_top_logprobs", 5),
        ("max_topk_logprobs=None", "max_top_logprobs", 20),
        ("uvicorn_log_level=critical", "gateway_log_level", "ERROR"),
        ("use_spec_allocation=T", "admission", "predicted"),
        ("use_spec_allocation=F", "admission", "guaranteed"),
        ("tokenizer=None", "tokenizer", None),
        ("async_tp_threshold=None", "async_tp_threshold", None),
        ("trust_remote_code=F", "model", "builtin"),
        ("rope_scaling=None", "model", "builtin"),
    ],
)
def test_a_flag_with_a_counterpart_takes_effect_without_a_note(given, name, value):
    assert getattr(load(DeploymentConfig, [given], {}), name) == value
    assert notes(DeploymentConfig, [given], {}) == []


@pytest.mark.parametrize("name", [name for name, each in ORIGINAL.items() if not each.counterpart and not each.silent])
def test_a_flag_without_a_counterpart_says_what_happens_instead(name):
    assert load(DeploymentConfig, [f"{name}=1"], {}) == DeploymentConfig()
    (note,) = notes(DeploymentConfig, [f"{name}=1"], {})
    assert note == f"flag {name}=1 of the original Tokasaurus has no effect: {ORIGINAL[name].meaning}"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("trust_remote_code=T", "flag trust_remote_code=T: code of a checkpoint is never run here.*leave the flag out"),
        ("trust_remote_code=maybe", "flag trust_remote_code=maybe: expected T or F"),
        ('rope_scaling={"rope_type": "linear", "factor": 2.0}', "flag rope_scaling=.*config.json: write it there"),
        ("max_topk_logprobs=21", "flag max_top_logprobs='21': input should be less than or equal to 20"),
        ("uvicorn_log_level=loud", "flag gateway_log_level='LOUD'"),
        ("max_num_tokens_per_request=many", "flag max_context_tokens='many'"),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_refused_with_the_reason(given, reason):
    with pytest.raises(FlagError, match=reason):
        load(DeploymentConfig, [given], {})


def test_two_names_of_one_flag_must_agree():
    both = ["kv_cache_num_tokens=1024", "kv_cache_size_num_tokens=2048"]
    with pytest.raises(FlagError, match=r"kv_cache_size_num_tokens=2048 means kv_cache_num_tokens=2048.*leave one"):
        load(DeploymentConfig, both, {})


def test_they_are_environment_variables_too_and_the_command_line_wins():
    environment = {"TOKA_KV_CACHE_SIZE_NUM_TOKENS": "2048", "TOKA_CUDAGRAPH_STEP": "16", "TOKA_TOKENIZER": "None"}
    assert load(DeploymentConfig, [], environment).kv_cache_num_tokens == 2048
    assert load(DeploymentConfig, ["kv_cache_num_tokens=4096"], environment).kv_cache_num_tokens == 4096
    assert notes(DeploymentConfig, [], environment) == [
        "flag cudagraph_step=16 of the original Tokasaurus has no effect: the sizes of CUDA graphs follow from"
        " `cudagraph_max_size`"
    ]
    assert misspelt(environment, DeploymentConfig.known()) == []


def test_each_service_accepts_those_whose_counterpart_it_has():
    assert load(WorkerConfig, ["max_num_tokens_per_request=64", "cudagraph_step=16"], {}).max_context_tokens == 64
    for kind in (GatewayConfig, SchedulerConfig):
        with pytest.raises(FlagError, match="unknown flag 'max_num_tokens_per_request'"):
            load(kind, ["max_num_tokens_per_request=64"], {})


def test_help_names_them_in_one_paragraph():
    *_, last = usage(DeploymentConfig).split("\n\n")
    assert all(name in last for name in ORIGINAL)
    assert len(last) < 1200


def test_the_program_prints_the_note_and_goes_on():
    code = "import sys; sys.argv[0] = 'tksrs'; from services.common.config import *; from_command_line(SchedulerConfig)"
    command = [sys.executable, "-c", code, "stop_string_num_token_lookback=5"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    assert done.stderr == (
        "tksrs: flag stop_string_num_token_lookback=5 of the original Tokasaurus has no effect: stop strings of any"
        " length are found wherever they begin\n"
    )
