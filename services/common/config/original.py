"""Flags of the original Tokasaurus (0.0.4) that have another name here, or no counterpart: one table.

A flag with a counterpart sets it. A flag without one is accepted, and the program prints what happens instead.
"""

from collections.abc import Callable, Mapping

from services.common.flags import Translation, true_false

# Levels of uvicorn that our logs do not have.
_LEVELS = {"TRACE": "DEBUG", "CRITICAL": "ERROR"}
_LEARNT = "expected lengths are learnt from the requests that finished; docs/scheduling.md says how"
_EXACT = "every admission is checked against the exact forecast of KV pages"


def _named(name: str) -> Translation:
    """Return the translation of a flag that has another name here."""
    return Translation(f"`{name}`", lambda value: {name: value}, counterpart=name)


def _instead(sentence: str) -> Translation:
    """Return the translation of a flag that has no counterpart; ``sentence`` says what happens instead."""
    return Translation(sentence, lambda value: {})


def _level(value: str) -> Mapping[str, str]:
    return {"gateway_log_level": _LEVELS.get(value.upper(), value)}


def _admission(value: str) -> Mapping[str, str]:
    return {"admission": "predicted" if true_false(value) else "guaranteed"}


def _refuse(reason: str, accepts: Callable[[str], bool]) -> Callable[[str], Mapping[str, str]]:
    """Return a function that raises ``ValueError`` with ``reason``, unless ``accepts`` returns True for the value."""

    def to(value: str) -> Mapping[str, str]:
        if not accepts(value):
            raise ValueError(reason)
        return {}

    return to


ORIGINAL: Mapping[str, Translation] = {
    "kv_cache_size_num_tokens": _named("kv_cache_num_tokens"),
    "max_num_tokens_per_request": _named("max_context_tokens"),
    "max_topk_logprobs": _named("max_top_logprobs"),
    "uvicorn_log_level": Translation("`gateway_log_level`", _level, counterpart="gateway_log_level"),
    "use_spec_allocation": Translation(
        "T: `admission=predicted`, F: `admission=guaranteed`", _admission, counterpart="admission"
    ),
    "trust_remote_code": Translation(
        "F is accepted; T is refused: code of a checkpoint is never run",
        _refuse(
            "code of a checkpoint is never run here: the architectures of docs/adding-a-model.md are built in; leave"
            " the flag out",
            lambda value: not true_false(value),
        ),
        silent=True,
    ),
    "rope_scaling": Translation(
        "refused: write it into `config.json`",
        _refuse(
            "gateway, scheduler and worker all read rope_scaling from the model's config.json: write it there and"
            " leave the flag out",
            lambda value: False,
        ),
        silent=True,
    ),
    "stop_string_num_token_lookback": _instead("stop strings of any length are found wherever they begin"),
    "enable_chosen_logprobs": _instead("log-probabilities are computed for the requests that ask for them"),
    "log_procs": _instead("all processes log; each line names its process in `service`"),
    "local_proc_name": _instead("every process is a child of `toka`"),
    "prefill_round_up_multiple": _instead("a prefill chunk has as many tokens as fit into the step"),
    "track_early_stopping": _instead(_LEARNT),
    "early_stopping_buffer_size": _instead(_LEARNT),
    "early_stopping_num_prediction_buckets": _instead(_LEARNT),
    "early_stopping_initial_wait": _instead(_LEARNT),
    "early_stopping_init_mean": _instead(_LEARNT),
    "early_stopping_init_std": _instead(_LEARNT),
    "spec_allocation_std_buffer_scale": _instead(
        "`admission_margin` keeps standard deviations of the whole forecast free, not of each sequence"
    ),
    "spec_allocation_target_kv_cache_utilization": _instead(
        "all pages are used but those that `admission_margin` keeps free"
    ),
    "enable_precise_onboard": _instead(_EXACT),
    "precise_onboard_batch_size": _instead(_EXACT),
    "greedy_prefill": _instead("each step is filled with prefill chunks behind its decodes"),
    "cudagraph_step": _instead("the sizes of CUDA graphs follow from `cudagraph_max_size`"),
    "cudagraph_max_kv_indices_per_seq": _instead("a CUDA graph takes sequences of any length"),
    "allocator_sanity_checks": _instead("`record_plans` records a run, and `toka-replay` checks every plan of it"),
    "bump_city_population_me": _instead("sequences are preempted only when the KV cache is full"),
}

# Methods of the original's config, which its command line calls.
METHODS: Mapping[str, str] = {".uvsh": "uvicorn_log_level=warning"}
