"""Metrics of a worker: of its steps, of its experts, and of its device if the driver reports them."""

from types import SimpleNamespace

import httpx
import numpy as np
import pynvml
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from bench.server import free_port
from services.worker.engine.power import Power
from services.worker.models.expert_load import imbalance
from tokasaurus.worker.v1 import plan_pb2


async def figures(port: int) -> dict[tuple[str, ...], float]:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    ours = [sample for sample in samples if sample.name.startswith("toka_worker_")]
    common = {"device": "cpu", "dp_rank": "0", "tp_rank": "0", "pp_rank": "0"}
    assert all(sample.labels.items() >= common.items() for sample in ours)
    return {
        (sample.name.removeprefix("toka_worker_"), *(sample.labels[key] for key in sample.labels.keys() - common)): (
            sample.value
        )
        for sample in ours
    }


async def test_a_worker_reports_its_steps(worker, connect):
    port = free_port()
    scheduler = await connect(await worker(metrics_port=port, device="cpu"))
    await scheduler.info()
    assert (await figures(port))["steps_total",] == 0
    await scheduler.connect()
    sampling = plan_pb2.SamplingSettings(parameters={"temperature": 0})
    await scheduler.run(
        admissions=[plan_pb2.Admission(slot=0, token_ids=[5, 6, 7], pages=[0], sampling=sampling)],
        batch=plan_pb2.Batch(slots=[0], token_counts=[3]),
    )
    await scheduler.run(batch=plan_pb2.Batch(slots=[0]))
    found = await figures(port)
    assert found["steps_total",] == 2
    assert found["step_seconds_total", "forward"] > 0
    assert found["step_seconds_total", "prepare"] > 0
    assert found["plans_queued",] == 0
    assert found["recompilations_total", "graph"] == found["recompilations_total", "kernel"] == 0
    assert ("energy_joules_total",) not in found


async def test_a_worker_with_experts_reports_their_load(worker, connect, checkpoint):
    port = free_port()
    model = str(checkpoint("qwen3_moe"))  # 8 experts, 3 of them for each token of each layer
    scheduler = await connect(await worker(metrics_port=port, device="cpu", model=model, torch_num_threads=1))
    await scheduler.info()
    before = await figures(port)
    assert before["expert_load_imbalance",] == 1
    assert sum(before["expert_tokens_total", str(expert)] for expert in range(8)) == 0
    await scheduler.connect()
    sampling = plan_pb2.SamplingSettings(parameters={"temperature": 0})
    await scheduler.run(
        admissions=[plan_pb2.Admission(slot=0, token_ids=range(11), pages=[0], sampling=sampling)],
        batch=plan_pb2.Batch(slots=[0], token_counts=[11]),
    )
    found = await figures(port)
    counts = [found["expert_tokens_total", str(expert)] for expert in range(8)]
    assert sum(counts) == 3 * 3 * 11  # three layers
    assert 1 < found["expert_load_imbalance",] <= 8


def test_imbalance_is_that_of_each_layer():
    assert imbalance(np.array([[4, 0], [0, 4]])) == 2
    assert imbalance(np.array([[3, 1, 1, 3], [2, 2, 2, 2]])) == (1.5 + 1) / 2
    assert imbalance(np.zeros((3, 4), np.int64)) == 1


def test_a_worker_without_a_gpu_reports_no_power():
    assert Power.of(torch.device("cpu")) is None


def test_a_driver_that_does_not_count_is_passed_over():
    def refuse(handle: object) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    counting = SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: 2**40,
        nvmlDeviceGetPowerUsage=lambda handle: 312_500,
    )
    power = Power(counting, None)
    assert (power.joules(), power.watts()) == (2**40 * 1e-3, 312.5)
    counting.nvmlDeviceGetTotalEnergyConsumption = counting.nvmlDeviceGetPowerUsage = refuse
    assert (power.joules(), power.watts()) == (None, None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_the_energy_is_that_of_the_driver():
    power = Power.of(torch.device("cuda", 0))
    before = power.joules()
    product = torch.ones(8192, 8192, device="cuda")
    while power.joules() == before:
        product = product @ product * 0
    assert 10 < power.watts() < 2000
