"""Asks a vulnerability service about every package of every image's lock.

``make audit`` runs it with the path of ``pip-audit`` as the first argument; others go to pip-audit, such as
``--vulnerability-service osv``. Exit status 0: the service knows every package, and no defect of any. 1: there are
defects. 2: it did not answer, or not for all, which is no good news and must not pass for it.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

LOCKS = Path(__file__).parent / "locks"


def main() -> None:
    command = [*sys.argv[1:], "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
    locks = packages()
    answers = [answer for name_once in rounds(locks) for answer in ask(command, name_once)]
    known = {(each["name"], each["version"]) for each in answers if "vulns" in each}
    missing = [f"{name} {version}: not audited" for name, version in sorted(set(locks) - known)]
    defects = [
        f"{each['name']} {each['version']} ({', '.join(sorted(locks[each['name'], each['version']]))}): {defect['id']},"
        f" fixed in {', '.join(defect['fix_versions']) or 'no version'}"
        for each in answers
        for defect in each.get("vulns", ())
    ]
    for line in [*defects, *missing]:
        print(line)
    if missing:
        end(2, f"audit: {len(missing)} of {len(locks)} packages were not audited: the service does not know them")
    if defects:
        end(1, f"audit: {len(defects)} defects; raise the versions in pyproject.toml and run make locks")
    print(f"audit: {len(locks)} packages, no known defect")


def packages() -> dict[tuple[str, str], set[str]]:
    """In which locks each name and version is. Markers do not count: images differ in their Python."""
    found = defaultdict(set)
    for path in sorted(LOCKS.glob("*.txt")):
        for package in re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", path.read_text()):
            found[package].add(path.stem)
    return found


def rounds(locks: dict[tuple[str, str], set[str]]) -> list[list[tuple[str, str]]]:
    """pip-audit takes one version of a package at a time."""
    left, divided = list(locks), []
    while left:
        once = dict(reversed(left))
        divided.append(sorted(once.items()))
        left = [each for each in left if each not in once.items()]
    return divided


def ask(command: list[str], wanted: list[tuple[str, str]]) -> list[dict]:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.writelines(f"{name}=={version}\n" for name, version in wanted)
        requirements.flush()
        outcome = subprocess.run([*command, "--requirement", requirements.name], capture_output=True, text=True)
    try:
        return json.loads(outcome.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (outcome.stderr.strip().splitlines() or ["no output"])[-1]
        end(2, f"audit: nothing was audited, pip-audit ended with status {outcome.returncode}: {last}")


def end(status: int, reason: str) -> None:
    print(reason, file=sys.stderr)
    raise SystemExit(status)


if __name__ == "__main__":
    main()
