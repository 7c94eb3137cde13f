"""The arrays of a step on their way to the device."""

import numpy as np

from services.worker.runner.cuda.transfers import Upload
from tests.worker.interpreter import DEVICE


def test_arrays_that_are_put_behind_a_copy_are_in_the_next():
    upload = Upload(100, DEVICE)
    first, second = upload.put(np.arange(3, dtype=np.int32)), upload.put(np.eye(2, dtype=np.float32))
    upload.send()
    assert upload.waiting == 0
    third = upload.put(np.array([7, 8]))
    upload.send()
    assert (first.tolist(), second.tolist(), third.tolist()) == ([0, 1, 2], [[1, 0], [0, 1]], [7, 8])
    assert all(each.data_ptr() % 16 == 0 for each in (first, second, third))
    upload.begin()
    again = upload.put(np.array([True, False]))
    upload.send()
    assert (again.tolist(), again.data_ptr()) == ([True, False], first.data_ptr())
