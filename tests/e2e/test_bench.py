"""Every program in bench/ runs, refuses a wrong flag, and prints its figures as one JSON object last."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from bench.admission import POLICIES, BenchConfig, share_prompt
from bench.coverage import coverage
from bench.gpus import EnergyMeter, Gpus
from bench.problems import read_problems
from bench.rollout import RolloutConfig, Rollouts, Update, find_wrong, first_tokens
from bench.traces import mix
from services.cli.bench.problems import Problem
from tokasaurus.scheduler.v1 import generate_pb2

PROGRAMS = {
    "serve_cpu": (["sequences=2", "max_tokens=8", "repeats=1"], "ratio_to_transformers"),
    "worker_step": (["batches=1,2", "contexts=16", "compare_batch=2", "steps=2", "rounds=1"], "steps"),
    "scheduler_capacity": (["sequences=64", "seconds=0.5"], "tokens_per_second"),
    "ingest": (["requests=16", "seconds=1"], "idle_s"),
    "admission": (
        ["prompts=2", "samples=16", "requests=32", "kv_cache_num_tokens=8192", "max_seqs_per_forward=64"],
        "predicted_over_oracle",
    ),
    "forecast": (["sequences=256", "repeats=2"], "admission_ms"),
    "coverage": (["samples=2", "problems=2", "max_tokens=16"], "pass@1"),
    "monkeys": (["prompts=2", "samples=4", "requests_per_prompt=2", "max_tokens=16"], "steady_tokens_per_second"),
    "mixed": (["requests=4", "stream=T", "longest_prompt=32", "longest_answer=8", "vocab_size=2000"], "tokens"),
    "latency": (
        ["concurrent=1,2", "rounds=1", "prompt_tokens=8", "output_tokens=8", "vocab_size=2000", "baseline=other:1.5"],
        "2",
    ),
    "live": (
        ["rates=20", "seconds=1", "prompt_tokens=4-8", "output_tokens=4", "shared_tokens=8", "vocab_size=2000"],
        "20",
    ),
    "gateway_capacity": (["requests=2", "samples=16", "sequences=64"], "cpu_s_per_million_tokens"),
    "offline": (["prompts=20", "repeats=1"], "ratio"),
    "rollout": (
        ["rounds=2", "prompts=2", "samples=4", "requests_per_prompt=2", "output_tokens=4-16"],
        "commit_to_first_token_ms",
    ),
    "sleep": (["sleeps=1", "output_tokens=4"], "wake_s"),
    "model": (["shape=tiny"], "bytes"),
    "worker": (["rows=4", "own=8", "steps=6", "skip=2", "window=3"], "tokens_per_second"),
    "cpu_experts": (["batches=1,5", "experts=4", "chosen=2", "hidden_size=64", "width=32", "rounds=1"], "rows"),
    "worker_plumbing": (["rows=3", "steps=300", "skip=50", "step_us=100"], "steps_per_s"),
    "fuzz_worker": (
        ["batches=200", "worker_flags=max_seqs_per_forward=32 max_tokens_per_forward=128 max_context_tokens=300"],
        "batches_per_second",
    ),
}
PLOTS = ("coverage", "admission", "monkeys", "live")
ASK_A_SERVER = ("monkeys", "mixed", "latency", "live")


def run(program: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", f"bench.{program}", *arguments], capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_last_line_holds_the_figures(program, builtin_server, tmp_path):
    arguments, figure = PROGRAMS[program]
    if program == "coverage":
        arguments = [*arguments, f"base_url={builtin_server.base_url}", f"output={tmp_path / 'curve.png'}"]
    elif program in PLOTS:
        arguments = [*arguments, f"plot={tmp_path / 'curve.png'}"]
    if program in ASK_A_SERVER:
        arguments = [*arguments, f"url={builtin_server.base_url}", "clients=1"]
    if program == "model":
        arguments = [*arguments, f"directory={tmp_path}"]
    outcome = run(program, *arguments)
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])
    assert figure in figures
    assert not figures.get("failures")
    assert not figures.get("wrong_lengths")
    if program in PLOTS:
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


# Runs the programs one after the other in one process, because imports take most of the time.
REFUSED = """
import json, runpy, sys
statuses = {}
for program in sys.argv[1:]:
    sys.argv = [program, "sequnces=2"]
    print("--", program, file=sys.stderr)
    try:
        runpy.run_module(f"bench.{program}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        statuses[program] = end.code
print(json.dumps(statuses))
"""


@pytest.mark.slow
def test_a_wrong_flag_is_refused():
    outcome = subprocess.run([sys.executable, "-c", REFUSED, *PROGRAMS], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr
    assert json.loads(outcome.stdout.splitlines()[-1]) == dict.fromkeys(PROGRAMS, 2)
    _, *said = outcome.stderr.split("-- ")
    assert len(said) == len(PROGRAMS)
    assert [text for text in said if "unknown flag 'sequnces'" not in text] == []


def test_pass_at_k_is_the_chance_that_a_draw_of_k_samples_holds_a_right_one():
    solved = np.zeros((2, 10), dtype=bool)
    solved[0, :3] = True
    assert coverage(solved, [1, 2, 8, 10]) == pytest.approx([0.15, (1 - 7 / 10 * 6 / 9) / 2, 0.5, 0.5])


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("6*7 = <<6*7=42>>42.\n#### 42", True),
        ("#### 42.0", True),
        ("#### $1,042", False),
        ("42", False),
        ("#### 4", False),
    ],
)
def test_an_answer_is_right_by_its_final_number(text, right):
    assert Problem("generated", "?", "42").solved_by(text) is right


def test_the_problems_have_answers():
    problems = read_problems()
    assert len(problems) == 100
    assert all(problem.solved_by(f"#### {problem.answer}") for problem in problems)


def rollouts(*spans: list[tuple[str, int]]) -> Rollouts:
    """Samples of three tokens that were sent after the first of two updates, with the given spans of versions."""
    found = Rollouts(RolloutConfig(), directory="", stub=None, call=None)
    found.updates = [Update(version, 0, 0, 0, 0) for version in ("old", "new")]
    for handle, versions in enumerate(spans):
        weights = [generate_pb2.WeightsSpan(version=version, tokens=tokens) for version, tokens in versions]
        usage = generate_pb2.Usage(completion_tokens=3)
        reason = generate_pb2.FINISH_REASON_LENGTH
        found.finishes[handle] = generate_pb2.Finish(reason=reason, usage=usage, weights=weights)
        found.newest.append(1)
    return found


def test_rollouts_are_right_if_committed_weights_generated_all_tokens_in_order():
    assert find_wrong(rollouts([("old", 3)], [("new", 3)], [("old", 1), ("new", 2)])) == []
    for spans in ([("other", 3)], [("old", 2)], [("new", 1), ("old", 2)], [("", 1), ("old", 2)], []):
        assert len(find_wrong(rollouts([("old", 3)], spans))) == 1
    late = rollouts([("old", 3)])
    late.newest = [2]  # sent after both updates
    assert len(find_wrong(late)) == 1


def test_the_first_token_of_new_weights_is_found_in_any_sample():
    found = rollouts([("old", 3)], [("old", 2), ("new", 1)])
    both, second = np.array([0, 1]), np.array([1])
    found.outputs = [(1.0, both, np.array([1, 1])), (2.0, both, np.array([2, 1])), (3.0, second, np.array([1]))]
    assert first_tokens(found) == {"old": 1.0, "new": 3.0}


def test_a_forecast_finishes_a_trace_in_fewer_steps_than_static_reservation():
    shape = BenchConfig(kv_cache_num_tokens=8192, max_seqs_per_forward=64).shape()
    static, guaranteed = (POLICIES[name](mix(48), shape) for name in ("static", "guaranteed"))
    assert len(guaranteed.pages) < len(static.pages)
    assert guaranteed.preemptions == static.preemptions == 0


def test_samples_of_one_prompt_compute_it_once_and_hold_its_pages_once():
    shared = share_prompt(24)
    whole, rest = divmod(shared.prompt_tokens, 16)
    assert shared.prompt_pages == whole
    assert shared.prefilled_tokens == shared.prompt_tokens + 23  # and the last token once more for each sibling
    assert shared.prefilled_again == rest + shared.second_prompt_tokens - shared.prompt_tokens


def test_energy_is_that_since_the_start_for_each_token():
    driver = SimpleNamespace(
        NVMLError=RuntimeError,
        millijoules=5000,
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetTotalEnergyConsumption=lambda gpu: driver.millijoules * (gpu + 1),
    )
    meter = EnergyMeter(Gpus(driver, ["0", "1"]))
    driver.millijoules += 4000
    assert meter.per_token(6) == {"joules_per_token": 2.0}
    assert meter.per_token(0) == {}


def test_without_a_measurement_there_is_no_energy():
    def refuse(gpu: int) -> int:
        raise RuntimeError("not supported")

    silent = SimpleNamespace(
        NVMLError=RuntimeError, nvmlDeviceGetHandleByIndex=int, nvmlDeviceGetTotalEnergyConsumption=refuse
    )
    assert EnergyMeter(Gpus(silent, ["0"])).per_token(6) == {}
    assert EnergyMeter(None).per_token(6) == {}
