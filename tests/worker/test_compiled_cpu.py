"""Functions that numba compiles and keeps on disk."""

import numba
import pytest

from services.worker.layers import compiled_cpu


@pytest.fixture
def helpers(tmp_path, monkeypatch):
    """A directory of modules that the function calls."""
    monkeypatch.setattr(compiled_cpu, "__file__", str(tmp_path / "layers/compiled_cpu.py"))
    (tmp_path / "sampling").mkdir()
    yield tmp_path / "sampling"
    compiled_cpu.source_version.cache_clear()


def test_another_version_of_a_helper_is_compiled_into_its_own_cache_file(helpers):
    """Numba notices changes of the function's file only."""
    names = []
    for source in ("first", "second", "first"):
        (helpers / "noise_cpu.py").write_text(source)
        compiled_cpu.source_version.cache_clear()

        def doubled(value):
            return 2 * value

        assert compiled_cpu.compile_function(doubled, numba.int64(numba.int64))(21) == 42
        names.append(doubled.__qualname__)
    assert names[0] == names[2] != names[1]
