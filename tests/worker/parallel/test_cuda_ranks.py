"""Several GPUs as one replica, over NCCL: compiled, with graphs, and whatever is exchanged how."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from bench.server import free_port
from services.common.model import files as model_files
from services.common.plan.types import Plan, WorkerLimits
from services.worker.described.ranks import Ranks
from services.worker.step.output import StepOutput
from tests.e2e.samples import Sample, agreement, random_prompt
from tests.worker.driver import Driver
from tests.worker.parallel import cuda_jobs, jobs
from tests.worker.parallel.pool import RankPool
from tests.worker.parallel.replica import cut
from tests.worker.parallel.test_grammars import history as grammar_history

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="torch sees fewer than two CUDA devices"),
    pytest.mark.timeout(600),  # each replica compiles
]

GRIDS = [(2, 1), (1, 2)]
# As of services/worker/__main__.py.
ENVIRONMENT = {
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_NVLS_ENABLE": "0",
}
FLAGS = {
    "device": "cuda",
    "torch_compile": True,
    "fail_on_recompile": True,
    "use_cudagraphs": True,
    "cudagraph_max_size": 64,
    "max_seqs_per_forward": 64,
    "max_tokens_per_forward": 512,
    "kv_cache_num_tokens": 16 * 1024,
}
TOKENS = 24
# As in tests/e2e/test_cuda.py.
BOUNDS = {"none": (0.25, 0.05, 0.93), "fp8": (2.0, 0.35, 0.7)}


class Replica:
    """Has what ``Driver`` needs of a runner."""

    def __init__(self, pool: RankPool, grid: tuple[int, int], flags: dict, fewest_sharded: int) -> None:
        self._pool, self._grid = pool, grid
        self.compiled = 0  # kernels and graphs, since it was ready
        everyone = pool.run(jobs.start, *grid, free_port(), model_files.BUILTIN, FLAGS | flags, fewest_sharded)
        assert all(limits == everyone[0] for limits in everyone)
        self.limits: WorkerLimits = everyone[0]

    def run(self, plan: Plan) -> StepOutput:
        if self.limits.max_micro_batches > 1 and plan.batch is not None:
            plan = replace(plan, micro_batch_rows=cut(len(plan.batch.slots), 3))
        return self.run_all([plan], 1)[0]

    def run_all(self, plans: Sequence[Plan], ahead: int) -> list[StepOutput]:
        """What the rank that reports gave; the others give nothing."""
        everyone = self._pool.run(run_ahead, *self._grid, list(plans), ahead)
        self.compiled = max(compiled for _, compiled in everyone)
        reporting, _ = everyone.pop((self._grid[1] - 1) * self._grid[0])
        assert all(not len(each.sampled.slots) and not each.scored for others, _ in everyone for each in others)
        return reporting

    def reset(self) -> None:
        self._pool.run(jobs.reset, *self._grid)

    def close(self) -> None:
        self._pool.run(stop, *self._grid)


def stop(ranks: Ranks) -> None:
    """A job: as ``jobs.stop``, and the next replica in this process may compile again."""
    jobs.stop(ranks)
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    torch.cuda.empty_cache()


def run_ahead(ranks: Ranks, plans: list[Plan], ahead: int) -> tuple[list[StepOutput], int]:
    """A job: outputs, with up to ``ahead`` steps in flight; and how much was compiled since the start."""
    from services.worker.boot.compilation import kernel_compilations, recompilations

    runner = jobs.booted.runner
    running, outputs = [], []
    for plan in plans:
        running.append(
            runner.start(plan if runner.limits.max_micro_batches > 1 else replace(plan, micro_batch_rows=()))
        )
        if len(running) == ahead:
            outputs.append(running.pop(0).result())
    return outputs + [step.result() for step in running], recompilations() + kernel_compilations()


def overlap(ranks: Ranks, port: int, sizes: Sequence[tuple[int, int, int]]) -> list[float]:
    """A job: by how much, at most, products that overlap differ from an exchange before or behind them; launched one by
    one and in graphs, twice each with other values."""
    from services.worker.layers.linear import Linear
    from services.worker.parallel.exchange import Overlapped, SequenceSharded
    from services.worker.parallel.group import RankGroup

    device = torch.device("cuda:0")
    group, place = RankGroup(ranks, "127.0.0.1", port, device, {}), (ranks.tp_rank, ranks.tp_size)
    assert group.shares_memory
    torch.manual_seed(ranks.tp_rank)
    worst = []
    with torch.inference_mode():
        for rows, inputs, outputs in sizes:
            first, second = (Linear(*size).to(device, torch.float32) for size in ((inputs, outputs), (outputs, inputs)))
            for linear in (first, second):
                torch.nn.init.normal_(linear.weight, std=0.1)
            x = torch.empty(rows // ranks.tp_size, inputs, device=device)

            def layers(exchange, x=x, rows=rows, first=first, second=second) -> torch.Tensor:
                for _ in range(3):
                    x = exchange.row(exchange.column(x, first, rows), second)
                return x

            x.normal_()
            found = layers(Overlapped(*place))
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                captured = layers(Overlapped(*place))
            for replayed in (False, False, True, True):
                x.normal_()
                if replayed:
                    graph.replay()
                found = captured if replayed else layers(Overlapped(*place))
                expected = layers(SequenceSharded(*place))
                worst.append(float((found - expected).abs().max() / expected.abs().max()))
            del graph, captured
    torch.cuda.synchronize()
    group.wait_for_all()
    group.close()
    return worst


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """A process for each of two devices."""
    made = RankPool(*(ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": str(device)} for device in range(2)), job_s=500.0)
    yield made
    made.close()


@pytest.fixture
def replica_of(pool) -> Iterator[Callable[..., Replica]]:
    """``replica_of(grid, fewest_sharded, flag=value, ...)``"""
    made = []

    def get(grid: tuple[int, int], fewest_sharded: int, **flags) -> Replica:
        made.append(Replica(pool, grid, flags, fewest_sharded))
        return made[-1]

    yield get
    for replica in made:
        replica.close()


def test_products_that_overlap_are_those_that_do_not(pool):
    sizes = [(2048, 512, 768), (256, 512, 256), (64, 64, 96), (2, 64, 64)]  # buffers only grow before graphs are made
    for worst in pool.run(overlap, 2, 1, free_port(), sizes):
        assert len(worst) == 4 * len(sizes)
        assert max(worst) < 1e-5


@pytest.mark.parametrize("history", [cuda_jobs.history, grammar_history], ids=["sampling", "grammars"])
@pytest.mark.parametrize("grid", GRIDS, ids=["tp", "pp"])
def test_float32_gives_what_one_cpu_gives(grid, history, replica_of):
    """Groups, micro-batches, chunks and every kind of sampling; steps in flight, and the same again after a reset."""
    flags = {"page_size": cuda_jobs.PAGE, "kv_cache_num_tokens": 64 * cuda_jobs.PAGE, "max_seqs_per_forward": 64}
    on_cpu, plans = {"device": "cpu", "dtype": "float32"} | flags, history()
    expected = cuda_jobs.plain_outputs(plans, jobs.make_config(Ranks(), 10510, model_files.BUILTIN, on_cpu))
    replica = replica_of(grid, 9, dtype="float32", **flags)
    for ahead in (1, 4):
        replica.reset()
        cuda_jobs.same(expected, replica.run_all(plans, ahead))
    assert replica.compiled == 0


@pytest.mark.parametrize("quantization", BOUNDS)
@pytest.mark.parametrize("grid", GRIDS, ids=["tp", "pp"])
def test_bfloat16_agrees_with_transformers(grid, quantization, replica_of, reference):
    """In graphs that reduce and graphs that shard, prompts in chunks beside rows that decode, cut into three."""
    expected = reference(model_files.BUILTIN)
    replica, answers = replica_of(grid, 32, quantization=quantization), []
    driver = Driver(replica)
    for lengths in ((1, 17, 200), range(1, 240, 5)):
        driver.reset()
        prompts = [random_prompt(length, expected.config.vocab_size) for length in lengths]
        driver.generate(prompts, TOKENS, chunk=96, logprobs=True)
        answers += [(prompt, Sample(driver.tokens[slot], driver.logprobs[slot])) for slot, prompt in enumerate(prompts)]
    agreement(expected, answers).check(*BOUNDS[quantization])
    assert replica.compiled == 0
