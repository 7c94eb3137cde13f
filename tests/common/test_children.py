import os
import site
import subprocess
import sys
from pathlib import Path

import pytest

from services.common.process import children
from services.common.process.children import module_command, module_environment

ROOT = Path(__file__).parents[2]
SPAWNS = """
import multiprocessing
import sys

from services.common.process.children import use_safe_paths

if __name__ == "__main__":
    use_safe_paths()
    process = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Path:
    """The current directory, with modules that note that they were run."""
    note = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__)\n"
    directory = tmp_path / "model"
    for name in ("json", "signal", "struct", "multiprocessing", "sitecustomize", "orjson", "services/__init__"):
        path = directory / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(note)
    monkeypatch.chdir(directory)
    return directory


def was_run(directory: Path) -> bool:
    return (directory.parent / "ran").exists()


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_modules_of_the_fixture_are_noticed(hostile):
    run([sys.executable, "-m", "services.common.rpc.probe"], {"PYTHONPATH": str(ROOT)})
    assert was_run(hostile)


def test_a_child_imports_nothing_from_the_current_directory(hostile):
    done = run(module_command("services.common.rpc.probe", "127.0.0.1:9"), module_environment(os.environ))
    assert done.returncode == 1, done.stderr
    assert not was_run(hostile)


def test_processes_of_multiprocessing_import_nothing_from_the_current_directory(hostile, tmp_path):
    program = tmp_path / "elsewhere" / "program.py"
    program.parent.mkdir()
    program.write_text(SPAWNS)
    done = run([sys.executable, str(program)], os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (0, "spawned\n"), done.stderr
    assert not was_run(hostile)


def test_children_of_a_checkout_import_the_same_services():
    found = module_environment({"PYTHONPATH": f"/first:{ROOT}:/second"})
    assert found == {"PYTHONPATH": f"{ROOT}:/first:/second", "PYTHONSAFEPATH": "1"}


def test_an_installed_package_is_not_put_before_the_standard_library(monkeypatch):
    monkeypatch.setattr(children, "_ROOT", Path(site.getsitepackages()[0]))
    assert module_environment({"PYTHONPATH": "/first"})["PYTHONPATH"] == "/first"
    assert "PYTHONPATH" not in module_environment({})


def test_an_empty_entry_does_not_mean_the_current_directory():
    assert module_environment({"PYTHONPATH": ":/first:"})["PYTHONPATH"] == f"{ROOT}:/first"
