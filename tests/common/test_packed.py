import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.packed import fill, read_fixed32, read_float
from tokasaurus.worker.v1 import plan_pb2


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300))
def test_whole_numbers_survive(values):
    result = plan_pb2.StepResult()
    fill(result, "slots", np.array(values, dtype=np.uint32))
    assert read_fixed32(plan_pb2.StepResult.FromString(result.SerializeToString()).slots).tolist() == values


@given(st.lists(st.floats(width=32), max_size=300))
def test_floats_survive(values):
    result = plan_pb2.StepResult()
    fill(result, "top_logprobs", np.array(values, dtype=np.float32))
    back = read_float(plan_pb2.StepResult.FromString(result.SerializeToString()).top_logprobs)
    np.testing.assert_array_equal(back, np.array(values, dtype=np.float32))


def test_filling_leaves_the_other_fields_alone():
    result = plan_pb2.StepResult(step=7)
    fill(result, "slots", np.arange(3))
    fill(result, "token_ids", np.arange(20_000))
    assert (result.step, len(result.slots), len(result.token_ids)) == (7, 3, 20_000)


def test_an_unknown_field_is_an_error():
    with pytest.raises(KeyError):
        fill(plan_pb2.StepResult(), "no_such_field", np.arange(3))
