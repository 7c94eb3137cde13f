"""The tables of models agree with the features that the code declares, the flags that it refuses, and its tests."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import build
from services.worker.described.config import ModelConfig
from services.worker.described.foreign import choose_implementation
from services.worker.described.heads import laid_out
from services.worker.described.layer import SupportedValues, undeclared
from services.worker.described.memory import BFLOAT16, page_bytes, weight_bytes
from services.worker.described.ranks import ALONE, Ranks
from services.worker.described.refusals import refuse_unquantizable_sizes, refuse_unsupported_cuda_sizes
from services.worker.described.registry import ARCHITECTURES
from services.worker.described.shares import local_config, refuse_unshareable
from services.worker.described.stages import layers_of
from services.worker.models import decoder
from services.worker.models.foreign.source import ForeignSource
from tests.checkpoints import ARCHITECTURES as CHECKPOINTS
from tests.docs.pages import ROOT, prose
from tests.docs.published import published
from tests.foreign_models import ARCHITECTURES as FOREIGN
from tests.foreign_models import make_foreign_config
from tests.quick import quick_if
from tests.worker.interpreter import needs_triton
from tests.worker.parallel.cases import CASES, EXPERT_CASES, MODELS

PAGE_SIZE = 16
TP_SIZES = (2, 4, 8)
NONE = "-"
PUBLISHED = published()
Table = dict[str, dict[str, str]]
# Building the model of an architecture takes long, so ``make test`` builds every eighth.
some_of_foreign = pytest.mark.parametrize("architecture", quick_if(set(list(FOREIGN)[::8]).__contains__, FOREIGN))
of_architectures = pytest.mark.parametrize("architecture", ARCHITECTURES)


def read_table(heading: str, page: str = "models.md") -> Table:
    """Return the rows of the last table under ``heading`` by their first cells, each with its cells by column."""
    section = prose(ROOT / "docs" / page).partition(f"## {heading}\n")[2].partition("\n## ")[0]
    table = [block.strip() for block in section.split("\n\n") if block.strip().startswith("|")][-1]
    head, _, *rows = (
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table.splitlines()
    )
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


TABLE = read_table("Which architectures?")
MEMORY_TABLE = read_table("How do I serve a mixture of experts?", "gpus.md")
WINDOW_TABLE = read_table("What do sliding windows save?")
FOREIGN_TABLE = read_table("Which other architectures run through transformers?")


def small(architecture: str) -> str:
    """Return the name that ``tests.checkpoints`` has for ``architecture``."""
    plain = architecture.removesuffix("ForCausalLM").lower()
    [name] = [name for name in CHECKPOINTS if name.replace("_", "") == plain]
    return name


def is_accepted(check: Callable[[], object]) -> bool:
    """Return whether ``check`` does not refuse the model."""
    try:
        check()
    except InvalidRequest:
        return False
    return True


def listed(sizes: Iterable[int]) -> str:
    return ", ".join(map(str, sizes)) or NONE


def shareable(model: ModelConfig, *, expert_parallel: bool = False) -> list[int]:
    """Return the sizes of ``TP_SIZES`` by which ``model`` can be split."""
    return [
        size
        for size in TP_SIZES
        if is_accepted(lambda size=size: refuse_unshareable(model, size, expert_parallel=expert_parallel))
    ]


def quantizable(model: ModelConfig) -> list[int]:
    """Return the sizes of 1 and ``TP_SIZES`` with which ``model`` can be served in fp8 on GPUs."""
    layers, laid = range(len(model.layers)), laid_out(model, "cuda")
    return [
        size
        for size in (1, *shareable(model))
        if is_accepted(lambda size=size: refuse_unquantizable_sizes(local_config(laid, Ranks(0, size), layers), size))
    ]


def declares(supported: SupportedValues, model: ModelConfig, *, attention: bool) -> bool:
    """Return whether an implementation computes all layers, or only the attention of all layers, of ``model``."""
    return not any(undeclared(layer.attention if attention else layer, supported) for layer in model.layers)


def sizes_in_cases(cases: Iterable[tuple], index: int) -> dict[str, set[int]]:
    """Return the sizes at ``index`` of ``cases`` that are above 1, by architecture."""
    found: dict[str, set[int]] = {}
    for case in cases:
        if case[index] > 1:
            found.setdefault(MODELS[case[0]][0], set()).add(case[index])
    return found


def test_every_architecture_has_a_row_and_a_published_model():
    assert list(TABLE) == sorted(ARCHITECTURES)
    assert set(PUBLISHED) == set(ARCHITECTURES)


@of_architectures
def test_the_example_is_the_model_whose_sizes_are_shown(architecture):
    assert TABLE[architecture]["example"] == PUBLISHED[architecture][0]


@of_architectures
def test_native_architectures_run_on_cpus(architecture):
    """``tests/worker/test_generation.py`` runs a checkpoint of each name in ``CHECKPOINTS``."""
    is_supported = declares(decoder.SUPPORTED, PUBLISHED[architecture][1], attention=False)
    assert TABLE[architecture]["implementation"] == "native"
    assert TABLE[architecture]["CPU"] == ("yes" if is_supported and small(architecture) else "no")


@needs_triton
@pytest.mark.usefixtures("triton_ready")
@of_architectures
def test_gpus_compute_the_attention_of_an_architecture(architecture):
    from services.worker.attention import cuda

    model = PUBLISHED[architecture][1]
    is_supported = declares(cuda.SUPPORTED, model, attention=True) and is_accepted(
        lambda: refuse_unsupported_cuda_sizes(PAGE_SIZE, model.stored_head_dim)
    )
    assert TABLE[architecture]["CUDA"] == ("yes" if is_supported else "no")


@of_architectures
def test_ranks_share_the_example(architecture):
    """``tests/worker/parallel/test_replicas.py`` compares the ranks of a small model with transformers."""
    sizes = shareable(PUBLISHED[architecture][1])
    assert TABLE[architecture]["tp_size"] == listed(sizes)
    assert sizes_in_cases(CASES, 1).get(small(architecture)), "no test runs it on several tensor-parallel ranks"


@of_architectures
def test_stages_share_the_layers_of_the_example(architecture):
    model = PUBLISHED[architecture][1]
    most = len(model.layers)
    assert is_accepted(lambda: layers_of(model, most))
    assert not is_accepted(lambda: layers_of(model, most + 1))
    assert TABLE[architecture]["pp_size"] == f"up to {most}"
    assert sizes_in_cases(CASES, 2).get(small(architecture)), "no test runs it on several stages"


@of_architectures
def test_ranks_have_whole_experts_of_the_example(architecture):
    sizes = shareable(PUBLISHED[architecture][1], expert_parallel=True)
    assert TABLE[architecture]["expert_parallel"] == listed(sizes)
    tested = sizes_in_cases(EXPERT_CASES, 1).get(small(architecture), set())
    assert bool(sizes) == bool(tested), "no test runs it with expert_parallel, or one that is refused"


@of_architectures
def test_the_example_can_be_quantized(architecture):
    """``tests/worker/test_quantization.py`` runs a checkpoint of each architecture in fp8."""
    assert TABLE[architecture]["quantization=fp8"] == listed(quantizable(PUBLISHED[architecture][1]))


def test_mixtures_of_experts_take_the_memory_that_is_shown():
    found = {}
    for name, model in PUBLISHED.values():
        if model.experts:
            laid, layers = laid_out(model, "cuda"), range(len(model.layers))
            plain, quantized = (weight_bytes(laid, ALONE, layers, BFLOAT16, each) for each in ("none", "fp8"))
            token = page_bytes(laid, PAGE_SIZE, BFLOAT16) // PAGE_SIZE
            found[name] = (f"{plain / 2**30:.1f} GiB", f"{quantized / 2**30:.1f} GiB", f"{token // 2**10} KiB")
    columns = ("weights in bf16", "quantization=fp8", "cache of a token")
    assert {name: tuple(row[column] for column in columns) for name, row in MEMORY_TABLE.items()} == found


def test_tokens_before_the_windows_take_the_memory_that_is_shown():
    tokens, found = 32768, {}
    for name, model in PUBLISHED.values():
        windows = [window for window in model.windows if window is not None]
        row = f"{name}: {len(windows)} of {len(model.layers)} layers, window {max(windows, default=0):,}"
        if row not in WINDOW_TABLE:
            continue
        token = page_bytes(laid_out(model, "cuda"), PAGE_SIZE, BFLOAT16) // PAGE_SIZE
        unread = sum(tokens - window for window in windows) * token / len(model.layers)
        sizes = (f"{size / 2**30:.2g} GiB" for size in (token * tokens, unread))
        found[row] = (f"{token // 2**10} KiB", *sizes)
    assert {row: tuple(cells.values())[1:] for row, cells in WINDOW_TABLE.items()} == found


@cache
def raw_config(architecture: str) -> dict[str, Any]:
    """Return the content of ``config.json`` of a tiny model that only transformers computes."""
    config = make_foreign_config(architecture)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return config.to_dict() | {"architectures": [type(model).__name__]}


def test_every_architecture_that_is_tested_through_transformers_has_a_row():
    """``tests/worker/test_foreign.py`` compares the tokens of each with those of transformers."""
    named = [raw_config(architecture)["architectures"][0] for architecture in FOREIGN]
    assert list(FOREIGN_TABLE) == sorted(named, key=str.lower)
    assert not FOREIGN_TABLE.keys() & ARCHITECTURES.keys()
    examples = [row["example"] for row in FOREIGN_TABLE.values()]
    assert all(examples)
    assert len(set(examples)) == len(examples)


@needs_triton
@pytest.mark.usefixtures("triton_ready")
@some_of_foreign
def test_a_row_says_where_transformers_computes_an_architecture(architecture):
    from services.worker.attention import cuda

    raw = raw_config(architecture)
    row = FOREIGN_TABLE[raw["architectures"][0]]
    described, _ = choose_implementation(raw, WorkerConfig(model="none"))
    model = ForeignSource(ROOT, raw, described, torch.float32).described
    is_supported = declares(cuda.SUPPORTED, model, attention=True) and is_accepted(
        lambda: refuse_unsupported_cuda_sizes(PAGE_SIZE, model.stored_head_dim)
    )
    assert (row["implementation"], row["CPU"]) == ("transformers", "yes")
    assert row["CUDA"] == ("yes" if is_supported else "no")


@pytest.mark.parametrize("flag", ["tp_size=2", "pp_size=2", "expert_parallel=T", "quantization=fp8"])
@some_of_foreign
def test_flags_of_a_row_that_are_refused_have_a_dash(architecture, flag):
    raw, (name, value) = raw_config(architecture), flag.split("=")
    flags = {name: value} | ({"tp_size": 2} if name == "expert_parallel" else {})
    config = build(WorkerConfig, {"model": "none"} | flags)
    row = FOREIGN_TABLE[raw["architectures"][0]]
    cell = row.get(flag, row.get(name))
    assert (cell == NONE) == (not is_accepted(lambda: choose_implementation(raw, config)))
