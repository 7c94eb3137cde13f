"""Every child process is started without the current directory on its module path (``children.py``)."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contracts.test_no_code_from_data import name_of

ROOT = Path(__file__).parents[2] / "services"
# Functions that start a process, or make what starts one, by module.
STARTS = {
    "subprocess": {"Popen", "run", "call", "check_call", "check_output", "getoutput", "getstatusoutput"},
    "asyncio": {"create_subprocess_exec", "create_subprocess_shell"},
    "multiprocessing": {"Process", "Pool", "Manager", "get_context", "set_start_method"},
    "concurrent.futures": {"ProcessPoolExecutor"},
    "torch.multiprocessing": {"spawn", "Process", "Pool", "get_context", "start_processes"},
    "pty": {"spawn", "fork"},
    "os": {
        *("system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp", "startfile"),
        *(f"exec{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
        *(f"spawn{kind}" for kind in ("l", "le", "lp", "lpe", "v", "ve", "vp", "vpe")),
    },
}
# File and function -> why it is safe without the helper.
OTHERS = {
    ("cli/doctor/host.py", "_run"): "docker",
    ("cli/bench/clients.py", "_start"): "cli/entry.py calls use_safe_paths",
    ("common/process/init.py", "run_under_init"): "isolated; starts the command line again that started this process",
    ("worker/boot/precompile/compiler.py", "__init__"): "forks: no interpreter starts",
    ("common/process/init.py", "main"): "runs the command that it was given, in an image that sets PYTHONSAFEPATH",
}


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name -> full name, of every import in a file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.asname: alias.name for alias in aliases if alias.asname}
            case ast.ImportFrom(module=str() as module, names=aliases):
                names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases}
    return names


def functions(tree: ast.AST) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield the name and the nodes of each function and, as ``<module>``, the nodes outside functions."""
    outer: list[ast.AST] = []
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, list(ast.walk(node))
        else:
            outer.append(node)
            waiting += ast.iter_child_nodes(node)
    yield "<module>", outer


def unsafe_starts(source: str) -> dict[str, str]:
    """Return the first unsafe start of a process in each function of a program."""
    tree = ast.parse(source)
    names = imported(tree)
    starts = {f"{module}.{name}" for module, found in STARTS.items() for name in found}
    found = {}
    for function, nodes in functions(tree):
        called = set()
        for node in nodes:
            if isinstance(node, ast.Call) and (name := name_of(node.func)):
                first, dot, rest = name.partition(".")
                called.add(names.get(first, first) + dot + rest)
            elif isinstance(node, ast.Attribute) and name_of(node) == "sys.executable":
                called.add("sys.executable")
        helpers = {name.rpartition(".")[2] for name in called if name.startswith("services.common.process.children.")}
        safe = {"module_command", "module_environment"} <= helpers or "script_command" in helpers
        if begun := sorted(called & starts):
            if not safe:
                found[function] = begun[0]
        elif "sys.executable" in called:
            found[function] = "sys.executable"
    return found


SAFE = """
from services.common.process.children import module_command, module_environment
def start():
    subprocess.Popen(module_command("a"), env=module_environment(os.environ))
"""


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import subprocess\nsubprocess.run([1])", True),
        ("from subprocess import run as go\ndef f():\n    go([1])", True),
        ("import asyncio\nasync def f():\n    await asyncio.create_subprocess_exec('a')", True),
        ("import multiprocessing as mp\nmp.get_context('spawn')", True),
        ("from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()", True),
        ("import os\nos.execv('a', ['a'])", True),
        ("import sys\ncommand = [sys.executable, '-m', 'a']", True),
        (SAFE, False),
        (SAFE.replace(", env=module_environment(os.environ)", ""), True),
        ("import asyncio\nasyncio.run(main())", False),
        ("runner.run(plan)", False),
    ],
)
def test_the_search_finds_what_it_looks_for(source, wrong):
    assert bool(unsafe_starts(source)) is wrong


def test_every_start_of_a_child_leaves_out_the_current_directory():
    found = {
        (str(path.relative_to(ROOT)), function): start
        for path in sorted(ROOT.rglob("*.py"))
        if path != ROOT / "common/process/children.py"
        for function, start in unsafe_starts(path.read_text()).items()
    }
    assert {place: start for place, start in found.items() if place not in OTHERS} == {}
    assert set(found) == set(OTHERS), "an exception that is of no use any more"


def test_images_leave_out_the_current_directory():
    images = sorted((ROOT.parent / "docker").glob("*.Dockerfile"))
    assert len(images) >= 3
    assert [path.name for path in images if "PYTHONSAFEPATH=1" not in path.read_text()] == []
