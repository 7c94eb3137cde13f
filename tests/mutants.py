"""Change one operator or constant at a time, and count how often the tests of its package fail: ``make mutants``.

``make mutants room=core count=40 seed=7`` tries 40 changes of one package. Without ``room`` it tries ``count`` changes
of each. It works on a copy of the tree, prints each change that no test notices, and the share that one does. The same
seed gives the same changes of the same code. ``tests/rooms.py`` lists the packages and their tests.
Runs in the environment of ``make mutants``, which has cosmic-ray and none of the project's packages.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.modules import find_modules
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome
from rooms import ROOMS, ROOT, Room

_NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "shared")
_UNIONS = "core/ReplaceBinaryOperator_BitOr"  # of types, nearly all of them


def sample(path: Path, count: int, draw: random.Random) -> list[MutationSpec]:
    """Return ``count`` mutations of the modules under ``path``: random places, and one random mutation of each."""
    places: dict[tuple[Path, tuple[int, int]], list[MutationSpec]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, use_db(Path(directory, "session.sqlite")) as session:
        init(find_modules([path]), session, {})
        for item in session.work_items:
            for mutation in item.mutations:
                if not mutation.operator_name.startswith(_UNIONS):
                    places[mutation.module_path, tuple(mutation.start_pos)].append(mutation)
    mutations = sorted(places.values(), key=lambda found: (str(found[0].module_path), found[0].start_pos))
    return [draw.choice(found) for found in draw.sample(mutations, min(count, len(mutations)))]


def is_python(mutation: MutationSpec) -> bool:
    """Return whether the mutated module can be compiled. A ``*`` between parameters counts as an operator too."""
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    try:
        compile(mutate_code(mutation.module_path.read_text(), operator, mutation.occurrence), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def check_tests(pytest: str, room: Room) -> None:
    """Exit with an error if a file of the room's tests has no test that runs."""
    command = f"{pytest} --collect-only {' '.join(room.test_files())}"
    collected = subprocess.run(command.split(), capture_output=True, text=True).stdout
    files = {line.partition("::")[0] for line in collected.splitlines() if "::" in line}
    if empty := [file for file in room.test_files() if file not in files]:
        raise SystemExit(f"tests/rooms.py: {', '.join(empty)} have no tests that run; correct or remove them")


def try_room(room: Room, count: int, draw: random.Random) -> tuple[int, int]:
    """Return the numbers of mutants that were killed and that were tried. Print those that survive."""
    pytest = f"{ROOT}/.venv/bin/python -m pytest -n 0 -x -p no:cacheprovider --hypothesis-profile=unshrunk"
    check_tests(pytest, room)
    command = f"{pytest} {' '.join(room.test_files())}"
    begun = time.monotonic()
    if os.system(f"{command} > baseline.log 2>&1") != 0:
        raise SystemExit(f"the tests of {room.path} fail without a change: {Path('baseline.log').read_text()[-2000:]}")
    timeout_s = 60 + 3 * (time.monotonic() - begun)
    killed = 0
    mutations = [mutation for mutation in sample(Path(room.path), count, draw) if is_python(mutation)]
    for number, mutation in enumerate(mutations, 1):
        result = mutate_and_test([mutation], command, timeout_s)
        if result.test_outcome not in (TestOutcome.KILLED, TestOutcome.SURVIVED):
            raise SystemExit(f"{mutation} could not be tried: {result.output}")
        place = f"{mutation.module_path}:{mutation.start_pos[0]}"
        if result.test_outcome == TestOutcome.SURVIVED:
            print(f"{number}/{len(mutations)} SURVIVED {place}\n{result.diff}", flush=True)
            continue
        killed += 1
        failed = next((line for line in (result.output or "").splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        print(f"{number}/{len(mutations)} killed {place} {failed[:160] or (result.output or '')[-80:]}", flush=True)
    return killed, len(mutations)


def main() -> None:
    """Try ``count`` mutants of each room, or of one."""
    flags = {"count": "20", "seed": "0", "room": ""} | dict(word.split("=", 1) for word in sys.argv[1:])
    names = [flags["room"]] if flags["room"] else list(ROOMS)
    figures = {}
    with tempfile.TemporaryDirectory(prefix="toka-mutants-") as directory:
        copy = Path(directory, "tree")
        shutil.copytree(ROOT, copy, ignore=_NOT_COPIED, symlinks=True)
        os.chdir(copy)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # a change within one second could go unnoticed
        os.environ["PYTHONPATH"] = f"{copy}:{copy}/protos"
        for name in names:
            figures[name] = try_room(ROOMS[name], int(flags["count"]), random.Random(f"{flags['seed']} {name}"))
    for name, (killed, tried) in figures.items():
        print(f"{name:10} {killed} of {tried} killed")


if __name__ == "__main__":
    main()
