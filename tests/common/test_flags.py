import sys

import pytest

from services.common.config import (
    ChosenWorkerConfig,
    DeploymentConfig,
    GatewayConfig,
    SchedulerConfig,
    WorkerConfig,
    usage,
)
from services.common.flags import FlagError, load, misspelt
from services.launcher.compose import ComposeConfig


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("(512 * 1024)", 524288),
        ("(2 ** 10 + 16 // 3)", 1029),
        ("(100 % 64)", 36),
        ("(-(-3) * 32)", 96),
        ("4096", 4096),
        ("(1e5)", 100000),
    ],
)
def test_whole_numbers_may_be_arithmetic_in_parentheses(text, tokens):
    assert load(WorkerConfig, [f"kv_cache_num_tokens={text}"], {}).kv_cache_num_tokens == tokens


@pytest.mark.parametrize(
    "text",
    [
        "(__import__('os').getpid())",
        "(2 ** 2 ** 2 ** 9)",
        "(9 ** 9 ** 9)",
        "((1.5 ** 63) ** 63)",
        "((-1) ** 0.5)",
        "(0 * 1e400)",
        "(2 ** 60)",
        "(1 / 0)",
        "(1 +)",
        "(True)",
        "([1][0])",
        "(1.5)",
    ],
)
def test_anything_else_in_parentheses_is_refused(text):
    with pytest.raises(FlagError, match="kv_cache_num_tokens"):
        load(WorkerConfig, [f"kv_cache_num_tokens={text}"], {})


def test_nested_parentheses_cannot_exhaust_the_stack():
    with pytest.raises(FlagError, match="kv_cache_num_tokens"):
        load(WorkerConfig, ["kv_cache_num_tokens=" + "(" * 5000 + "1" + ")" * 5000], {})


@pytest.mark.parametrize(("text", "value"), [("T", True), ("F", False), ("true", True), ("0", False)])
def test_booleans_are_t_and_f(text, value):
    assert load(SchedulerConfig, [f"prefix_caching={text}"], {}).prefix_caching is value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle=x"], "unknown flag 'modle'.*did you mean model="),
        (["zzzzzz=1"], "unknown flag 'zzzzzz'.*the flags are .*page_size"),
        (["/some/dir"], "^'/some/dir' is not a flag: write flag=value; the argument help lists the flags$"),
        (["model"], "no value: write model=VALUE"),
        (["model=a", "model=b"], "given twice"),
        (["page_size=many"], "flag page_size='many': input should be a valid integer"),
        (["page_size=0"], "flag page_size='0': input should be greater than or equal to 1"),
        (["torch_compile=maybe"], "flag torch_compile='maybe': expected T, F or auto"),
        (["device=tpu"], "flag device='tpu': input should be 'auto', 'cpu' or 'cuda'"),
        (["kv_cache_num_tokens=8"], "less than one page"),
    ],
)
def test_a_wrong_flag_says_which_and_what_was_expected(arguments, message):
    with pytest.raises(FlagError, match=message):
        load(WorkerConfig, arguments, {})


def test_the_command_line_wins_over_the_environment():
    environment = {"TOKA_PORT": "1", "TOKA_HOST": "::", "TOKA_MODEL": "", "PORT": "9"}
    config = load(GatewayConfig, ["port=2"], environment)
    assert (config.port, config.host, config.model) == (2, "::", "builtin")


def test_a_wrong_environment_value_names_the_flag():
    with pytest.raises(FlagError, match="flag port='x'"):
        load(GatewayConfig, [], {"TOKA_PORT": "x"})


def test_a_misspelt_environment_variable_is_noticed():
    environment = {"TOKA_PROT": "1", "TOKA_PORT": "2", "TOKA_GATEWAY_SERVICE_HOST": "a", "PROT": "3"}
    assert misspelt(environment, DeploymentConfig.model_fields) == [
        "TOKA_PROT in the environment is no flag: did you mean TOKA_PORT=?"
    ]


@pytest.mark.parametrize("flags", [["port=10310"], ["port=9001", "grpc_port=9000", "dp_size=2"]])
def test_the_gateway_and_a_scheduler_cannot_share_a_port(flags):
    with pytest.raises(FlagError, match="a scheduler has it"):
        load(DeploymentConfig, flags, {})


def test_addresses_are_separated_by_commas():
    config = load(GatewayConfig, ["scheduler_addresses=a:1, b:2"], {})
    assert config.scheduler_addresses == ("a:1", "b:2")
    with pytest.raises(FlagError, match="scheduler_addresses"):
        load(GatewayConfig, ["scheduler_addresses="], {})


def test_a_flag_that_would_be_ignored_is_refused():
    with pytest.raises(FlagError, match="flag async_tp_threshold=6144: has no effect without tp_size=2 or more"):
        load(DeploymentConfig, ["async_tp_threshold=6144"], {})
    assert load(DeploymentConfig, ["async_tp_threshold=2048", "tp_size=2"], {}).async_tp_threshold == 2048


@pytest.mark.parametrize(
    "flag",
    [
        "worker_listen=0.0.0.0:1",
        "worker_addresses=a:1,b:1",
        "scheduler_listen=0.0.0.0:1",
        "scheduler_addresses=a:1",
        "master_addr=host-a",
        "master_port=1",
        "dp_rank=1",
        "tp_rank=1",
        "pp_rank=1",
    ],
)
def test_toka_places_its_children_itself(flag):
    name = flag.partition("=")[0]
    with pytest.raises(FlagError, match=f"flag {name}: toka chooses the addresses and ranks of its children itself"):
        load(DeploymentConfig, ["tp_size=2", "pp_size=2", flag], {})


def test_replicas_of_several_ranks_are_configured_at_once():
    flags = ["dp_size=2", "tp_size=2", "pp_size=2", "pp_layers=5,3", "pp_num_buffer_stages=2"]
    config = load(DeploymentConfig, flags, {})
    assert (config.dp_size, config.tp_size, config.pp_size) == (2, 2, 2)
    assert (config.pp_layers, config.pp_num_buffer_stages) == ((5, 3), 2)


OFF = ["use_hydragen=F"]  # by default the worker decides


@pytest.mark.parametrize("kind", [SchedulerConfig, DeploymentConfig])
@pytest.mark.parametrize(
    ("flag", "needed"),
    [
        ("hydragen_min_group_size=64", "use_hydragen=T"),
        ("hydragen_min_prefix_len=64", "use_hydragen=T"),
        ("pp_num_buffer_stages=0", "pp_size=2"),
    ],
)
def test_a_flag_that_means_nothing_without_another_is_refused_without_it(kind, flag, needed):
    with pytest.raises(FlagError, match=f"flag {flag}: has no effect without {needed}"):
        load(kind, [flag, *(OFF if needed == "use_hydragen=T" else [])], {})


@pytest.mark.parametrize("kind", [WorkerConfig, DeploymentConfig])
@pytest.mark.parametrize(
    ("flag", "needed"),
    [
        ("cudagraph_max_size=64", "use_cudagraphs=T"),
        ("piecewise_cudagraph_max_tokens=0", "use_cudagraphs=T"),
        ("fail_on_recompile=T", "torch_compile=T"),
    ],
)
def test_a_flag_of_the_worker_that_means_nothing_without_another_is_refused_without_it(kind, flag, needed):
    with pytest.raises(FlagError, match=f"flag {flag}: has no effect without {needed}; leave it out, or set both"):
        load(kind, [flag, needed.replace("=T", "=F")], {})
    assert load(kind, [flag, needed], {})
    assert load(kind, [flag], {})  # the worker chooses the other flag so that this one has an effect


def test_piecewise_cuda_graphs_beyond_the_largest_step_are_refused():
    with pytest.raises(FlagError, match="piecewise_cudagraph_max_tokens=4096: more tokens than a step has"):
        load(WorkerConfig, ["max_tokens_per_forward=2048", "piecewise_cudagraph_max_tokens=4096"], {})


def test_hydragen_is_accepted_whatever_the_device():
    """On a CPU the scheduler says that it has no effect: the same command line serves with and without a GPU."""
    for device in ("auto", "cpu", "cuda"):
        assert load(DeploymentConfig, ["use_hydragen=T", f"device={device}"], {}).use_hydragen


def test_a_cache_of_fp8_is_refused_where_the_worker_is_to_be_on_a_cpu():
    with pytest.raises(FlagError, match="flag kv_cache_dtype=fp8: only on cuda, and device is cpu; leave it at"):
        load(DeploymentConfig, ["kv_cache_dtype=fp8", "device=cpu"], {})
    for device in ("auto", "cuda"):
        assert load(DeploymentConfig, ["kv_cache_dtype=fp8", f"device={device}"], {}).kv_cache_dtype == "fp8"


@pytest.mark.parametrize(("text", "pages"), [("auto", None), ("(512 * 1024)", 32768), ("47", 2)])
def test_the_cache_has_whole_pages_or_as_many_as_fit(text, pages):
    config = load(ChosenWorkerConfig, [f"kv_cache_num_tokens={text}"], {})
    assert config.page_count == pages


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("kv_cache_num_tokens=automatic", "flag kv_cache_num_tokens='automatic'"),
        ("kv_cache_num_tokens=-5", "flag kv_cache_num_tokens='-5': expected 1 to 1099511627776, or auto"),
        ("kv_cache_num_tokens=(2 ** 41)", "expected 1 to 1099511627776, or auto"),
        ("load_format=pt", "flag load_format='pt': input should be 'safetensors' or 'dummy'"),
        ("kv_cache_dtype=bfloat16", "flag kv_cache_dtype='bfloat16': input should be 'auto' or 'fp8'"),
        (
            "quantization=int2",
            "flag quantization='int2': input should be 'auto', 'none', 'checkpoint', 'fp8', 'int8' or 'int4'",
        ),
        ("cudagraph_max_size=4", "flag cudagraph_max_size='4': expected 8 to 8192, or auto"),
        ("compile_cache_dir=", "flag compile_cache_dir=''.*at least 1"),
    ],
)
def test_a_wrong_flag_of_the_worker_is_named(flag, message):
    with pytest.raises(FlagError, match=message):
        load(WorkerConfig, [flag], {})


def test_a_scheduler_takes_what_its_worker_may_not_do():
    """Workers differ. A worker that does not support a flag is refused when it connects."""
    arguments = ["use_hydragen=T", "hydragen_min_group_size=8", "hydragen_min_prefix_len=(2 * 64)"]
    config = load(SchedulerConfig, [*arguments, "pp_size=2", "pp_num_buffer_stages=0"], {})
    assert (config.use_hydragen, config.hydragen_min_group_size, config.hydragen_min_prefix_len) == (True, 8, 128)
    assert (config.pp_size, config.pp_num_buffer_stages) == (2, 0)


def test_admission_is_chosen_for_each_priority_class():
    assert load(SchedulerConfig, [], {}).admission == "predicted"
    assert load(DeploymentConfig, ["admission=guaranteed"], {}).admission == "guaranteed"
    config = load(DeploymentConfig, [], {"TOKA_GUARANTEED_CLASSES": "high, normal"})
    assert (config.admission, config.guaranteed_classes) == ("predicted", ("high", "normal"))


@pytest.mark.parametrize("kind", [SchedulerConfig, DeploymentConfig])
def test_classes_are_not_named_guaranteed_where_all_are(kind):
    with pytest.raises(FlagError, match="flag guaranteed_classes=high,low: has no effect with admission=guaranteed"):
        load(kind, ["admission=guaranteed", "guaranteed_classes=high,low"], {})


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("admission=oracle", "flag admission='oracle': input should be 'predicted' or 'guaranteed'"),
        (
            "guaranteed_classes=high,urgent",
            "guaranteed_classes=.*'urgent' is no priority class.*high, normal, low",
        ),
        ("admission_margin=-1", "flag admission_margin='-1'.*greater than or equal to 0"),
        ("admission_margin=nan", "flag admission_margin='nan'.*finite"),
        ("priority_ageing_seconds=inf", "flag priority_ageing_seconds='inf'"),
        ("hydragen_min_group_size=1", "flag hydragen_min_group_size='1'.*greater than or equal to 2"),
        ("record_plans=", "flag record_plans=''.*at least 1"),
    ],
)
def test_a_wrong_flag_of_the_scheduler_is_named(flag, message):
    with pytest.raises(FlagError, match=message):
        load(SchedulerConfig, [flag], {})


def test_the_flags_of_the_original_are_all_known():
    original = (
        "model tokenizer dp_size pp_size tp_size kv_cache_num_tokens max_tokens_per_forward max_seqs_per_forward"
        " page_size torch_compile use_cudagraphs use_hydragen hydragen_min_group_size hydragen_min_prefix_len"
        " pp_num_buffer_stages async_tp_threshold port stats_report_seconds log_level device dtype"
    )
    assert set(original.split()) <= set(DeploymentConfig.model_fields)


def test_usage_shows_every_flag():
    text = usage(DeploymentConfig)
    assert all(f"  {name}=" in text for name in DeploymentConfig.fields_by_flag())
    assert all(f"  {name}=" not in text for name in DeploymentConfig.refused)


@pytest.mark.parametrize("kind", [DeploymentConfig, WorkerConfig, ComposeConfig])  # the last has no examples
def test_usage_fits_the_terminal(kind, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["toka"])
    monkeypatch.setenv("COLUMNS", "100")
    text = usage(kind)
    # Only commands that a reader may copy are not broken.
    assert [line for line in text.splitlines() if len(line) > 100 and not line.startswith("  toka ")] == []
    assert "\n\n\n" not in text
    assert "``" not in text


ALL_THREE = ["grpc_cert=c", "grpc_key=k", "grpc_ca=a"]


@pytest.mark.parametrize("kind", [GatewayConfig, SchedulerConfig, WorkerConfig, DeploymentConfig])
def test_half_a_certificate_is_refused(kind):
    for flags, sentence in (
        (["grpc_cert=c"], "flag grpc_cert=c: has no effect without grpc_key=; leave it out, or set both"),
        (["grpc_key=k", "grpc_ca=a"], "flag grpc_key=k: has no effect without grpc_cert="),
        (["grpc_server_name=s"], "flag grpc_server_name=s: has no effect without grpc_ca="),
    ):
        with pytest.raises(FlagError, match=sentence):
            load(kind, flags, {})
    assert load(kind, ALL_THREE, {}).has_mutual_tls


@pytest.mark.parametrize(
    ("kind", "flags", "sentence"),
    [
        (GatewayConfig, ALL_THREE[:2], "flag grpc_cert=c: a gateway shows it to schedulers that it can verify"),
        (DeploymentConfig, ALL_THREE[:2], "set grpc_ca=, too"),
        (SchedulerConfig, ALL_THREE[:2], ""),
        (WorkerConfig, ALL_THREE[:2], ""),
        (GatewayConfig, ALL_THREE[2:], ""),
        (SchedulerConfig, ALL_THREE[2:], ""),
        (WorkerConfig, ALL_THREE[2:], "flag grpc_ca=a: has no effect without grpc_cert= and grpc_key="),
        (DeploymentConfig, ALL_THREE[2:], "flag grpc_ca=a: has no effect without grpc_cert= and grpc_key="),
    ],
)
def test_a_certificate_or_authorities_alone_do_where_they_are_of_use(kind, flags, sentence):
    if not sentence:
        load(kind, flags, {})
        return
    with pytest.raises(FlagError, match=sentence):
        load(kind, flags, {})


@pytest.mark.parametrize("address", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "worker:1", ":1", "unix-abstract:worker"])
def test_a_worker_does_not_listen_for_everybody(address):
    listen = f"worker_listen={address}"
    for flags in ([], ALL_THREE[:2]):
        with pytest.raises(FlagError, match=r"set grpc_cert=, grpc_key= and grpc_ca= \(mTLS\).* set insecure_worker=T"):
            load(WorkerConfig, [listen, *flags], {})
    load(WorkerConfig, [listen, *ALL_THREE], {})
    load(WorkerConfig, [listen, "insecure_worker=T"], {})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/worker.sock"])
def test_a_worker_listens_for_this_host_without_certificates(address):
    load(WorkerConfig, [f"worker_listen={address}"], {})


def test_the_workers_of_toka_need_no_permission():
    with pytest.raises(FlagError, match="flag insecure_worker: the workers of toka listen on unix sockets"):
        load(DeploymentConfig, ["insecure_worker=T"], {})
