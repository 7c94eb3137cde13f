"""docs/architecture.md says of every file of services/ which process and thread runs it."""

import ast
from functools import cache
from pathlib import Path

from tests.docs.threads import CALLERS, SERVICES, folders, rows, threads

# What begins a thread or a process, or hands work to one; it shows who differs from the folder.
_BEGIN = {
    *("Thread", "ThreadPoolExecutor", "ProcessPoolExecutor", "to_thread", "run_in_executor", "get_context"),
    *("Popen", "create_subprocess_exec", "posix_spawn", "posix_spawnp", "execv", "fork", "in_thread", "worked"),
}
_SUBPROCESS = {"run", "check_output", "check_call", "call"}  # of the module


@cache
def _calls(path: Path) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _begins(call: ast.Call) -> bool:
    function = call.func
    of_subprocess = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") == "subprocess"
    return _name(call) in _BEGIN or (of_subprocess and _name(call) in _SUBPROCESS)


def test_every_folder_has_a_row():
    # What packages of services/ are read from: a folder of data has none.
    assert folders() - {row.path for row in rows()} == set()


def test_every_row_is_of_a_file_or_folder_that_is_there():
    paths = [row.path for row in rows()]
    assert len(paths) == len(set(paths)) > 50
    missing = [path for path in paths if not (SERVICES / path).exists()]
    assert missing == []
    assert [path for path in paths if path.endswith("/") != (SERVICES / path).is_dir()] == []


def test_every_file_that_begins_a_thread_or_a_process_has_a_row_of_its_own():
    beginning = {str(path.relative_to(SERVICES)) for path in SERVICES.rglob("*.py") if any(map(_begins, _calls(path)))}
    assert len(beginning) > 20
    assert beginning - {row.path for row in rows()} == set()


def test_every_thread_that_the_code_names_is_in_the_table_of_threads():
    named = set()
    for path in SERVICES.rglob("*.py"):
        for call in _calls(path):
            for keyword in call.keywords:
                pool = keyword.arg == "thread_name_prefix"
                if pool or (keyword.arg == "name" and _name(call) == "Thread"):
                    named |= _texts(keyword.value, "_N" if pool else "")
    named |= {f"{name}_N" for name in ("grammars", "matchers")}  # sampling/matchers.py passes them on
    assert len(named) > 15
    assert named - threads().keys() == set()


def _texts(node: ast.expr, end: str) -> set[str]:
    """What a name may be, a number in it as N; nothing where it is passed on."""
    if isinstance(node, ast.Constant):
        return {f"{node.value}{end}" if node.value != "tokasaurus" else "event loop"}
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "N" for part in node.values]
        return {"".join(map(str, parts)) + end}
    return set()


def test_rows_name_threads_of_the_processes_they_name():
    """Other words in code style are of files and programs."""
    known, wrong = threads(), []
    for row in rows():
        named = row.threads & known.keys()
        if not named and not CALLERS.search(row.text):
            wrong.append(f"{row.path}: no thread")
        for name in row.threads - known.keys():
            if not _is_of(SERVICES / row.path, name):
                wrong.append(f"{row.path}: what is {name}?")
        for name in named:
            if row.processes != {"all"} and not known[name] & row.processes:
                wrong.append(f"{row.path}: no {name} in {', '.join(sorted(row.processes))}")
    assert wrong == []


def _is_of(path: Path, name: str) -> bool:
    """Whether ``name`` is a program, a file in the folder ``path``, or a word of the file ``path``."""
    if path.is_dir():
        return name.startswith("toka-") or (path / name).is_file()
    return name.startswith("toka") or name in path.read_text()


def test_every_thread_runs_something():
    used = {name for row in rows() for name in row.threads}
    assert threads().keys() - used == set()
