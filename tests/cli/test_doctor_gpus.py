"""toka-doctor on machines with GPUs, which are a library of the tests' own in the place of NVIDIA's."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from services.cli.doctor import machine
from services.cli.doctor.findings import Finding, Level
from services.cli.doctor.machine import installed_torch, visible_of
from services.cli.doctor.nvml import GpuInfo
from tests.cli.looking import findings

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> dict[str, str]:
    """The environment of a machine with the fake driver."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("needs a C compiler")
    directory = tmp_path_factory.mktemp("driver")
    library = directory / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-o", library, HERE / "fake_nvml.c"], check=True)
    return {"LD_LIBRARY_PATH": str(directory)}


@pytest.fixture
def gpus(driver, monkeypatch):
    """Looks in this process, on a machine with GPUs as they are described."""

    def look_at(subject: str, *, visible: str | None = None, flags: dict[str, Any], **described: Any) -> list[Finding]:
        for name, value in driver.items():
            monkeypatch.setenv(name, value)
        for name, value in described.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", str(value))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        return findings(subject, **flags)

    return look_at


TWO = {"device": "cuda", "tp_size": 2}


def test_gpus_are_named_with_what_is_free(gpus):
    found = gpus("gpu", flags={"device": "cuda"}, count=2, mib=81920, free_mib=40960)
    assert [each.level for each in found] == [Level.WARN, Level.WARN]
    assert "0: Fake H1, capability 9.0, 40.0 GiB of 80.0 GiB free; other programs use it" in found[0].text


def test_the_memory_of_the_scarcest_gpu_counts(gpus):
    flags = {"device": "cuda", "max_seqs_per_forward": 256, "max_tokens_per_forward": 2048, "cudagraph_max_size": 64}
    [free] = gpus("memory", flags=flags, mib=24576)
    [taken] = gpus("memory", flags=flags, mib=24576, free_mib=8192)
    lost = free.facts["cache_tokens_that_fit"] - taken.facts["cache_tokens_that_fit"]
    assert lost * free.facts["bytes_per_token"] == pytest.approx(16 * 2**30, rel=0.001)


@pytest.mark.parametrize(
    ("described", "level", "sentence"),
    [
        ({}, Level.OK, "GPUs 0-1 reach each other by NVLink"),
        ({"nvlink": 5}, Level.WARN, "no NVLink between GPUs 0-1"),
        ({"peers": 5, "nvlink": 5}, Level.WARN, "GPUs 0-1 cannot read each other's memory"),
        ({"old": 1}, Level.WARN, "no NVLink between GPUs 0-1"),
    ],
)
def test_links_between_the_ranks_of_a_replica_are_looked_at(described, level, sentence, gpus):
    [found] = gpus("links", flags=TWO, count=2, **described)
    assert found.level is level
    assert sentence in found.text


def test_too_few_gpus_fail(gpus):
    few = [each for each in gpus("gpu", flags=TWO, count=1) if each.level is Level.FAIL]
    assert "2 workers need a GPU each, but 1 are visible" in few[0].text
    hidden = [each for each in gpus("gpu", flags=TWO, count=2, visible="1") if each.level is Level.FAIL]
    assert len(hidden) == 1
    none = [each for each in gpus("gpu", flags={"device": "cuda"}, count=2, visible="-1") if each.level is Level.FAIL]
    assert "CUDA_VISIBLE_DEVICES shows none" in none[0].text


@pytest.mark.parametrize(("flag", "least"), [("kv_cache_dtype", "8.9"), ("quantization", "9.0")])
def test_a_gpu_without_fp8_fails_where_it_is_asked_for(flag, least, gpus):
    flags = {"device": "cuda", flag: "fp8"}
    assert gpus("flags", flags=flags) == []
    [found] = gpus("flags", flags=flags, major=8)
    assert found.level is Level.FAIL
    assert f"flag {flag}=fp8: Fake H1" in found.text
    assert f"{least} and later" in found.text


def test_shares_of_a_gpu_are_not_taken_for_none(gpus):
    shares = gpus("gpu", flags={"device": "cuda"}, visible="MIG-1234")
    assert [each.level for each in shares] == [Level.OK, Level.UNKNOWN]
    assert gpus("memory", flags={"device": "cuda"}, visible="MIG-1234") == []


def test_what_can_be_seen_is_what_cuda_sees():
    first, second = (GpuInfo(index, f"GPU-{index}abc", "", 1, 1, (9, 0)) for index in range(2))
    assert visible_of((first, second), None) == [first, second]
    assert visible_of((first, second), "1,0") == [second, first]
    assert visible_of((first, second), "GPU-1,0") == [second, first]
    assert visible_of((first, second), "0,7,1") == [first]
    assert visible_of((first, second), "") == []


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({"init": 9}, "NVIDIA's driver does not answer: Driver Not Loaded"),
        ({"crash": 1}, "asking NVIDIA's driver ended with status -6"),
    ],
)
def test_a_driver_that_does_not_work_is_a_finding(described, sentence, gpus):
    [needed] = gpus("gpu", flags={"device": "cuda"}, **described)
    assert needed.level is Level.FAIL
    assert sentence in needed.text
    [other] = gpus("gpu", flags={}, **described)
    assert other.level is Level.UNKNOWN
    assert "workers run on the CPU" in other.text


def test_a_torch_that_does_not_go_with_the_driver_is_named(gpus, monkeypatch):
    for torch_build, flags, level, sentence in (
        (machine.Torch("2.13.0+cpu", None), {}, Level.WARN, "built for CPUs, but there are GPUs"),
        (machine.Torch("2.13.0+cpu", None), {"device": "cuda"}, Level.FAIL, "built for CPUs, but there are GPUs"),
        (machine.Torch("2.13.0", (14, 0)), {}, Level.FAIL, "driver 580.1 supports CUDA up to 13.0"),
        (machine.Torch("2.13.0", (13, 2)), {}, Level.OK, "built for CUDA 13.2"),
        (None, {}, Level.WARN, "no worker can start"),
    ):
        monkeypatch.setattr(machine, "installed_torch", lambda build=torch_build: build)
        [found] = gpus("torch", flags=flags)
        assert found.level is level
        assert sentence in found.text


def test_the_torch_that_is_installed_is_known_without_loading_it():
    found = installed_torch()
    cuda = torch.version.cuda
    assert found.version == torch.__version__
    assert found.cuda == (cuda and tuple(map(int, cuda.split(".")[:2])))
