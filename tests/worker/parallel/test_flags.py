"""The flags of one of several workers."""

import pytest

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.flags import FlagError, load
from services.worker.boot.common import boot


def test_a_rank_is_told_from_the_environment_too():
    environment = {"TOKA_TP_SIZE": "2", "TOKA_TP_RANK": "1", "TOKA_PP_SIZE": "3", "TOKA_MASTER_ADDR": "worker-0"}
    config = load(WorkerConfig, ["pp_rank=2", "pp_layers=3,4,2", "master_port=10999"], environment)
    assert (config.tp_rank, config.tp_size, config.pp_rank, config.pp_size) == (1, 2, 2, 3)
    assert (config.pp_layers, config.master_addr, config.master_port) == ((3, 4, 2), "worker-0", 10999)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tp_rank=1"], "flag tp_rank=1: ranks count from 0, and tp_size is 1; expected less, or a larger tp_size"),
        (["pp_size=2", "pp_rank=2"], "flag pp_rank=2: ranks count from 0, and pp_size is 2"),
        (["pp_layers=3,4"], "flag pp_layers=3,4: expected a number of layers, 1 or more, for each of pp_size=1 stages"),
        (["pp_size=2", "pp_layers=3,0"], "flag pp_layers=3,0: expected a number of layers, 1 or more"),
        (["master_port=10600"], "flag master_port=10600: has no effect without tp_size=2 or pp_size=2 or more"),
        (["master_addr=worker-0"], "flag master_addr=worker-0: has no effect without tp_size=2 or pp_size=2"),
        (["async_tp_threshold=4096"], "flag async_tp_threshold=4096: has no effect without tp_size=2 or more"),
        (
            ["async_tp_threshold=4096", "tp_size=2", "max_tokens_per_forward=2048"],
            "flag async_tp_threshold=4096: more tokens than a step has with max_tokens_per_forward=2048; lower it",
        ),
        (["tp_size=65"], "flag tp_size='65'.*less than or equal to 64"),
    ],
)
def test_a_wrong_flag_of_a_rank_is_named(flags, message):
    with pytest.raises(FlagError, match=message):
        load(WorkerConfig, flags, {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"tp_size": 3}, "flag tp_size=3: the model's num_attention_heads is 4, which 3 ranks cannot share equally"),
        ({"pp_size": 4}, "flag pp_size=4: the model has 3 layers, and every stage needs one; lower it"),
        ({"pp_size": 2, "pp_layers": (2, 2)}, "flag pp_layers=2,2: 4 layers in all, and the model has 3"),
    ],
)
def test_what_the_model_does_not_allow_is_refused_before_anybody_is_waited_for(flags, message, checkpoint):
    with pytest.raises(InvalidRequest, match=message) as refused:
        boot(WorkerConfig(model=str(checkpoint()), torch_num_threads=1, **flags))
    assert refused.value.field in flags


def test_products_do_not_overlap_on_a_cpu():
    config = WorkerConfig(tp_size=2, async_tp_threshold=64, device="cpu")
    with pytest.raises(InvalidRequest, match="flag async_tp_threshold=64: only on cuda, and this worker runs on cpu"):
        boot(config)
