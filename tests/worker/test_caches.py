"""Where compiled kernels are kept."""

import os
import subprocess
import sys

import pytest

from services.common.errors import InvalidRequest
from services.worker.boot.caches import keep_compiled_code_in

VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE", "NUMBA_CACHE_DIR")


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "before")


def test_every_compiler_keeps_its_code_in_one_directory(tmp_path):
    keep_compiled_code_in(str(tmp_path / "not" / "there"))
    found = [os.environ[variable] for variable in VARIABLES]
    assert found == [str(tmp_path / "not" / "there" / name) for name in ("inductor", "triton", "flashinfer", "numba")]
    assert all(os.path.isdir(each) for each in found)


def test_torch_is_not_loaded_before(tmp_path):
    code = "import sys, services.worker.boot.caches as caches; caches.keep_compiled_code_in(sys.argv[1])"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", "/proc/kernels"):
        with pytest.raises(InvalidRequest, match=f"flag compile_cache_dir={directory}: cannot write there") as refused:
            keep_compiled_code_in(str(directory))
        assert refused.value.field == "compile_cache_dir"
    assert os.environ["TRITON_CACHE_DIR"] == "before"
