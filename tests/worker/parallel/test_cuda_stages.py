"""Several ranks of the GPU's runner give what one CPU gives: kernels in Triton's interpreter, collectives over gloo,
streams that do nothing and graphs that launch again. ``test_cuda_ranks.py`` has the devices themselves."""

import pytest

from bench.server import free_port
from tests.worker.interpreter import INTERPRETED, needs_triton
from tests.worker.parallel.cuda_jobs import history, plain_outputs, run_as_rank, same

pytestmark = [
    needs_triton,
    pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled for the devices here"),
    pytest.mark.timeout(300),  # half a minute of the interpreter on each of up to four ranks
]


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "graphs", "pieces", "ahead", "fewest_sharded", "times", "pads"),
    [
        pytest.param(2, 1, 8, 16, 3, 8, 2, True, marks=pytest.mark.slow),
        (2, 1, 0, 0, 1, 9, 1, True),
        pytest.param(1, 2, 0, 0, 2, 9, 1, True, marks=pytest.mark.slow),
        pytest.param(1, 2, 8, 16, 4, 9, 2, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 8, 16, 3, 9, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 2, 8, 16, 3, 4, 1, False, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_what_one_cpu_gives(tp_size, pp_size, graphs, pieces, ahead, fewest_sharded, times, pads, pool):
    """With few tokens reduced and many sharded, some steps in flight, and some of them through graphs, whole or
    between attentions."""
    plans = history()
    flags = graphs, ahead, fewest_sharded, times, pieces, pads
    everyone = pool.run(run_as_rank, tp_size, pp_size, free_port(), plans, *flags)
    reporting = everyone.pop((pp_size - 1) * tp_size)
    assert all(not len(output.sampled.slots) and not output.scored for others in everyone for output in others)
    same(plain_outputs(plans), reporting)
