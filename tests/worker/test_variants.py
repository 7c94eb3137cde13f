"""Every configuration of a native family gives the logits of transformers, in every situation."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.model.json_object import read_json
from services.worker.boot.common import boot
from services.worker.described.ranks import ALONE
from services.worker.described.registry import read_model_config
from tests.quick import quick_if
from tests.variants import FAMILIES, Variant, make_variant
from tests.worker.parallel.jobs import make_config
from tests.worker.parallel.pool import RankPool
from tests.worker.parallel.replica import Replica
from tests.worker.situations import (
    FLAGS,
    TOKENS,
    Computed,
    Expected,
    assert_near,
    check,
    logits_in_chunks,
    run_situations,
    tokens_of,
)

SOME = [Variant(family, 0) for family in FAMILIES]
ALL = [Variant(family, number) for family in FAMILIES for number in range(10)]


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """``made(variant)``: its checkpoint and the logits that are expected of it."""

    def make(variant: Variant) -> tuple[Path, Expected]:
        directory = make_variant(tmp_path_factory.mktemp("variant") / str(variant), variant)
        return directory, Expected(directory)

    return make


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Two processes."""
    pool = RankPool({}, {})
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "variant",
    quick_if(lambda variant: variant.family not in {"gemma2", "gemma3", "mixtral", "qwen3", "qwen3_moe"}, SOME),
    ids=str,
)
def test_logits_of_a_sequence_in_chunks(variant, made):
    directory, expected = made(variant)
    token_ids = tokens_of(TOKENS)
    logits = logits_in_chunks(directory, token_ids, (1, 16, 17, 50, 216))
    assert_near(logits, expected.of([token_ids])[0])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ALL, ids=str)
def test_logits_of_ten_variants_in_every_situation(variant, made, ranks):
    """On one worker, on two tensor-parallel ranks, and on two pipeline stages."""
    directory, expected = made(variant)
    token_ids = tokens_of(TOKENS)
    for chunks in ((TOKENS,), (1, 16, 17, 50, 216)):
        logits = logits_in_chunks(directory, token_ids, chunks)
        assert_near(logits, expected.of([token_ids])[0])
    check(run_alone(directory), expected)
    # Activations are sharded over the ranks in some variants, and ranks have whole experts in others.
    experts = read_model_config(read_json(directory / "config.json")).experts
    whole = bool(experts) and variant.number % 3 == 0
    flags = FLAGS | ({"expert_parallel": True} if whole else {})
    check(run_on_replica(ranks, 2, 1, directory, flags, 1 if variant.number % 2 else 10**6), expected)
    check(run_on_replica(ranks, 1, 2, directory, FLAGS, 10**6), expected)


def run_alone(directory: Path) -> list[Computed]:
    runner = boot(make_config(ALONE, 10510, directory, FLAGS)).runner
    with contextlib.closing(runner):
        return run_situations(runner)


def run_on_replica(
    pool: RankPool, tp_size: int, pp_size: int, directory: Path, flags: dict, sharded: int
) -> list[Computed]:
    with contextlib.closing(Replica(pool, tp_size, pp_size, directory, flags, sharded)) as replica:
        return run_situations(replica)
