"""Functions that numba compiles and keeps on disk."""

import numba
import numpy as np
import pytest

from services.worker.layers import compiled_cpu
from services.worker.layers.compiled_cpu import compile_function


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """A directory of the worker's modules."""
    monkeypatch.setattr(compiled_cpu, "_WORKER", tmp_path)
    (tmp_path / "sampling").mkdir()
    yield tmp_path
    compiled_cpu.source_version.cache_clear()


def multiplied_by(factor):
    """Return a function, and the name of its files."""

    def multiplied(value):
        return factor * value

    return compile_function(multiplied, numba.int64(numba.int64)), multiplied.__qualname__


def raised_by(summand, factor):
    """Return a function that calls another, and the name of its files."""
    multiplied, _ = multiplied_by(factor)

    @numba.njit
    def added(value):
        return value + summand

    def both(value):
        return added(multiplied(value))

    return compile_function(both, numba.int64(numba.int64)), both.__qualname__


def test_another_version_of_a_module_has_files_of_its_own(worker):
    """Numba notices changes of the function's file only."""
    names = []
    for source in ("first", "second", "first"):
        (worker / "sampling/noise_cpu.py").write_text(source)
        compiled_cpu.source_version.cache_clear()
        function, name = multiplied_by(2)
        assert function(21) == 42
        names.append(name)
    assert names[0] == names[2] != names[1]


def test_other_variables_have_files_of_their_own_also_in_functions_that_are_called():
    assert [multiplied_by(factor)[0](21) for factor in (2, 3)] == [42, 63]
    assert [raised_by(*each)[0](21) for each in ((1, 2), (5, 2), (1, 3))] == [43, 47, 64]
    assert len({raised_by(*each)[1] for each in ((1, 2), (5, 2), (1, 3), (1, np.float32(2)))}) == 4
    assert raised_by(1, 2)[1] == raised_by(1, 2)[1]


def test_a_function_with_others_is_found_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    first, second = (raised_by(1, 2)[0] for _ in range(2))
    assert sum(first.stats.cache_misses.values()) == sum(second.stats.cache_hits.values()) == 1
    assert first(21) == second(21) == 43


def test_a_disk_without_space_does_not_matter(monkeypatch):
    def save(self, key, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "save", save)
    assert multiplied_by(7)[0](6) == 42


def test_a_variable_that_may_change_is_refused():
    with pytest.raises(TypeError, match=r"a compiled function captures \[2\]; capture numbers"):
        multiplied_by([2])
