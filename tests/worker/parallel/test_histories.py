"""Whatever plans come, several ranks give what one gives."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.properties import examples
from tests.quick import quick_if
from tests.worker.parallel.histories import histories
from tests.worker.parallel.jobs import run_on
from tests.worker.parallel.replica import alone, same

# Fast to compile for: query heads and key heads are in the same proportion on one rank and on several.
MODEL = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 3}


@pytest.mark.hypothesis
@pytest.mark.parametrize(
    ("tp_size", "pp_size", "fewest_sharded"),
    quick_if(lambda tp_size, pp_size, fewest_sharded: pp_size + tp_size == 4, [(1, 2, 1), (1, 3, 1), (2, 2, 6)]),
)
def test_any_history_gives_what_one_rank_gives(tp_size, pp_size, fewest_sharded, checkpoint, replica_of):
    """With sharded activations in some micro-batches, where there are ranks to shard them over."""
    directory = checkpoint("llama", **MODEL)
    runner = alone(directory)
    replica = replica_of(tp_size, pp_size, directory, fewest_sharded)

    @settings(derandomize=True, max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
    @given(histories(replica.limits))
    def check(plans):
        runner.reset()
        replica.reset()
        same(run_on(runner, plans), replica.run_all(plans))

    check()
