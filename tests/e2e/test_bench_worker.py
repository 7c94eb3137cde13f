"""bench.worker: a recording is run again, and kernels are assigned to parts."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.kernel_table import tabulate
from bench.random_plans import RandomPlans
from bench.roofline import PARTS, Rates, least_ms
from bench.step_sizes import SizeTracker, StepSizes
from services.common.plan.codec import encode_plan
from services.common.plan.types import NO_GROUPS, WorkerLimits
from services.worker.described.layer import ExpertsConfig
from tests.fakes.model import FakeModel, FakeShape
from tests.worker.small_models import small_config
from tokasaurus.worker.v1 import record_pb2

SHAPE = FakeShape(page_count=100, max_slots=8, max_tokens_per_step=64, max_context_tokens=200, hydragen=False)
LIMITS = WorkerLimits(16, 100, 8, 64, 200, SHAPE.vocab_size, 20)


def write(path: Path, plans: int) -> None:
    model, random = FakeModel(SHAPE), RandomPlans(LIMITS, 0)
    records = [record_pb2.Record(connected=record_pb2.Connected(info=SHAPE.worker_info(), plans_in_flight=2))]
    for _ in range(plans):
        message = encode_plan(random.next()[0])
        ids = {"admitted_ids": ["x"] * len(message.admissions), "released_ids": ["x"] * len(message.release_slots)}
        records.append(record_pb2.Record(plan=record_pb2.PlanRecord(plan=message, **ids)))
        records.append(record_pb2.Record(result=record_pb2.ResultRecord(result=model.apply(message))))
    with path.open("wb") as file:
        for record in records:
            payload = record.SerializeToString()
            length = len(payload)
            while length > 0x7F:
                file.write(bytes((length & 0x7F | 0x80,)))
                length >>= 7
            file.write(bytes((length,)) + payload)


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "bench.worker", *arguments], capture_output=True, text=True)


@pytest.mark.slow
def test_the_plans_of_a_recording_are_run(tmp_path):
    write(tmp_path / "plans-1.tkrec", 3)
    write(tmp_path / "plans-2.tkrec", 40)  # the larger one
    outcome = run(f"record={tmp_path}", "skip=10", "window=10", "worker_flags=torch_num_threads=1")
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])
    assert figures["source"].endswith("plans-2.tkrec")
    assert [window["last_step"] for window in figures["windows"]] == [20, 30, 40]
    tracker, random = SizeTracker(LIMITS), RandomPlans(LIMITS, 0)
    samples = [tracker.apply(random.next()[0]).samples for _ in range(40)]
    assert sum(window["sampled"] for window in figures["windows"]) == sum(samples[10:])


@pytest.mark.slow
def test_a_worker_that_is_too_small_is_refused(tmp_path):
    write(tmp_path / "plans-1.tkrec", 3)
    outcome = run(f"record={tmp_path}", "skip=0", "worker_flags=max_seqs_per_forward=4")
    assert outcome.returncode == 2
    assert "recorded with max_slots=8, but the worker has 4" in outcome.stderr


@pytest.mark.slow
def test_several_numbers_of_sequences_are_measured_with_one_worker():
    outcome = run("rows=2,5", "own=8", "steps=6", "skip=2", "window=3", "worker_flags=torch_num_threads=1")
    assert outcome.returncode == 0, outcome.stderr
    figures = json.loads(outcome.stdout.splitlines()[-1])
    assert {rows: [each["rows"] for each in of["windows"]] for rows, of in figures["by_rows"].items()} == {
        "2": [2, 2], "5": [5, 5],
    }  # fmt: skip
    assert figures["windows"] == figures["by_rows"]["5"]["windows"]


def test_sizes_follow_what_the_plans_expect():
    limits = replace(LIMITS, hydragen=True)
    tracker, random = SizeTracker(limits), RandomPlans(limits, 3)
    for _ in range(300):
        plan, expected = random.next()
        sizes = tracker.apply(plan)
        assert (sizes.rows, sizes.tokens) == (random.rows_in_batch, random.tokens_in_batch)
        assert sizes.samples == len(expected.slots)
        assert (sizes.prefix_pairs > 0) <= (random.groups is not NO_GROUPS)


def test_kernels_are_told_apart_by_name_and_place():
    layer = ["nvjet_hsh_256x128", "_rotate_and_store", "void flashinfer::PrefillWithKVCacheKernel<cutlass::x>"]
    layer += ["_decode", "void flashinfer::PrefillWithKVCacheKernel<cutlass::x>", "nvjet_hsh_128x64"]
    layer += ["triton_red_fused_add_mean_rsqrt_1", "nvjet_hsh_2", "triton_poi_fused_mul_silu_2", "nvjet_hsh_3"]
    names = ["Memcpy HtoD", "_gather_inputs", *layer, *layer, "triton_red_fused_rsqrt_9"]
    names += ["nvjet_hsh_head", "summarise", "pick"] * 2 + ["_advance", "unheard_of"]
    table = tabulate([(name, 1.0) for name in names], grouped=True)
    assert table.parts == {
        "copies": 1, "rest": 3, "layer products": 8, "store": 2, "attention prefix": 2, "attention own": 2,
        "attention chunks": 2, "norms": 3, "activation": 2, "vocabulary head": 2, "sampling": 4,
    }  # fmt: skip
    ungrouped = tabulate([(name, 1.0) for name in ["_rotate_and_store", layer[2], "_decode"]], grouped=False)
    assert ungrouped.parts["attention chunks"] == 1
    names = ["_rotate_and_store", "copy_prefixes", "attend_prefixes", "_decode", "_attend"]
    wide = tabulate([(name, 1.0) for name in names], grouped=True)
    assert wide.parts == {"store": 1, "attention prefix": 2, "attention own": 1, "attention chunks": 1}
    mixture = tabulate([(name, 1.0) for name in ["_route", "_place", "_products", "_products", "_sum"]], grouped=False)
    assert mixture.parts == {"experts": 5}


def test_the_least_time_is_that_of_arithmetic_or_of_bytes():
    model, slow = small_config(), Rates(bf16=1e6, fp8=2e6, copy=1e30)
    sizes = StepSizes(rows=4, tokens=4, samples=4, own_context=40)
    found = least_ms(sizes, model, slow)
    assert set(found) == set(PARTS)
    assert found["vocabulary head"] == pytest.approx(2 * 4 * model.hidden_size * model.vocab_size / 1e6 * 1000)
    assert least_ms(sizes, model, slow, fp8=True)["vocabulary head"] == pytest.approx(found["vocabulary head"] / 2)
    experts = small_config(mlp=ExpertsConfig(count=8, chosen=2, width=48))
    of_experts = least_ms(sizes, experts, slow)["experts"]
    assert of_experts == pytest.approx(3 * 2 * 4 * 2 * 3 * 64 * 48 / 1e6 * 1000)  # three layers
    read = least_ms(sizes, experts, Rates(1e30, None, 1e6))["experts"]
    assert read == pytest.approx(3 * 8 * (1 - 0.75**4) * 3 * 64 * 48 * 2 / 1e6 * 1000)
    in_bf16, in_fp8 = (least_ms(sizes, model, Rates(1e30, None, 1e6), fp8_cache=fp8) for fp8 in (False, True))
    cached = 2 * model.kv_heads * model.head_dim * len(model.layers) / 1e6 * 1000  # time of a byte of each value
    assert in_bf16["attention own"] - in_fp8["attention own"] == pytest.approx(40 * cached)
    assert in_bf16["store"] - in_fp8["store"] == pytest.approx(4 * cached)
    assert in_bf16["sampling"] == pytest.approx(4 * model.vocab_size * 2 / 1e6 * 1000)
    assert in_bf16["attention own"] > 2 * 40 * cached
