"""Functions that numba compiles and keeps on disk."""

import json
import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from services.worker.layers import compiled_cpu
from services.worker.layers.compiled_cpu import compile_function


def compile_multiplication(factor):
    """Return a function, and the name of its files."""

    def multiplied(value):
        return factor * value

    return compile_function(multiplied, numba.int64(numba.int64)), multiplied.__qualname__


def compile_sum(summand, factor):
    """Return a function that calls another, and the name of its files."""
    multiplied, _ = compile_multiplication(factor)

    @numba.njit
    def added(value):
        return value + summand

    def both(value):
        return added(multiplied(value))

    return compile_function(both, numba.int64(numba.int64)), both.__qualname__


def test_another_version_of_the_worker_has_files_of_its_own(monkeypatch):
    names = []
    for sources in ("first", "second", "first"):
        monkeypatch.setattr(compiled_cpu, "_SOURCES", sources)
        function, name = compile_multiplication(2)
        assert function(21) == 42
        names.append(name)
    assert names[0] == names[2] != names[1]


def test_a_broken_file_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    assert compile_sum(1, 2)[0](21) == 43
    for path in tmp_path.rglob("*.nb?"):
        path.write_bytes(path.read_bytes()[:-40])
    assert compile_sum(1, 2)[0](21) == 43
    assert sum(compile_sum(1, 2)[0].stats.cache_hits.values()) == 1


STORE = """
import sys
import numba
from services.worker.layers.compiled_cpu import compile_function

def make(factor):
    @numba.njit
    def called(value):
        # Too long to be inlined.
        total = 0
        for i in range(value):
            for j in range(i):
                total += (i * j) % (factor + j) if (i + j) % 3 else i ^ j ^ factor
        return total
    return called

def compiled(factor):
    called = make(factor)
    def outer(value):
        return called(value) + called(value + 1) + called(value + 2)
    return compile_function(outer, numba.int64(numba.int64))

print([compiled(int(each))(50) for each in sys.argv[1:]])
"""


def test_functions_stored_by_two_processes_call_their_own_functions(tmp_path):
    """Both processes number their functions in the same way, and the functions have equal names."""
    script = tmp_path / "store.py"
    script.write_text(STORE)
    # Names also depend on the order of a set, which a fixed seed keeps.
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONHASHSEED": "0"}

    def run(*factors: int) -> list[int]:
        command = [sys.executable, str(script), *map(str, factors)]
        return json.loads(subprocess.run(command, check=True, env=environment, capture_output=True).stdout)

    first, second = run(5), run(9)
    assert first != second
    assert run(5, 9) == first + second


def test_other_variables_have_files_of_their_own_also_in_functions_that_are_called():
    assert [compile_multiplication(factor)[0](21) for factor in (2, 3)] == [42, 63]
    assert [compile_sum(*each)[0](21) for each in ((1, 2), (5, 2), (1, 3))] == [43, 47, 64]
    assert len({compile_sum(*each)[1] for each in ((1, 2), (5, 2), (1, 3), (1, np.float32(2)))}) == 4
    assert compile_sum(1, 2)[1] == compile_sum(1, 2)[1]


def test_a_function_with_others_is_found_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(tmp_path))
    first, second = (compile_sum(1, 2)[0] for _ in range(2))
    assert sum(first.stats.cache_misses.values()) == sum(second.stats.cache_hits.values()) == 1
    assert first(21) == second(21) == 43


def test_a_disk_without_space_does_not_matter(monkeypatch):
    def save(self, key, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(numba.core.caching.IndexDataCacheFile, "save", save)
    assert compile_multiplication(7)[0](6) == 42


def test_a_variable_that_may_change_is_refused():
    with pytest.raises(TypeError, match=r"a compiled function captures \[2\]; capture numbers"):
        compile_multiplication([2])
