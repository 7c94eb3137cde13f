"""The packages of the images are locked, fit pyproject.toml, and are audited or listed as not audited."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.launcher.compose import ComposeConfig, overlay

ROOT = Path(__file__).parents[2]
LOCKS = {path.stem: path.read_text() for path in (ROOT / "docker" / "locks").glob("*.txt")}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = {
    "gateway": ("gateway", "postgres"),
    "scheduler": ("scheduler",),
    "worker": ("worker", "worker-transformers"),
    "worker-cuda": ("worker-cuda", "worker-transformers"),
}
PYTHONS = ("3.11.15", "3.12.13")


def locked(name: str, python: str) -> dict[str, str]:
    """Versions that pip would install there."""
    environment = default_environment() | {
        "sys_platform": "linux",
        "platform_machine": "x86_64",
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
    }
    lines = re.findall(r"(?m)^(\S.*==.*?)(?: \\)?$", LOCKS[name])
    requirements = [each for each in map(Requirement, lines) if not each.marker or each.marker.evaluate(environment)]
    versions = {each.name: str(each.specifier).removeprefix("==") for each in requirements}
    assert len(versions) == len(requirements), f"{name}: two versions of one package"
    return versions


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """Return the requirements of pyproject.toml and of ``extras``, with those of the extras that they include."""
    project, found = PROJECT["project"], []
    for extra in extras:
        for each in map(Requirement, project["optional-dependencies"][extra]):
            found += wanted(tuple(each.extras)) if each.name == project["name"] else [each]
    return found + [Requirement(each) for each in project["dependencies"]]


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("name", EXTRAS)
def test_a_lock_has_what_its_extras_ask_for(name: str, python: str):
    versions = locked(name, python)
    for each in wanted(EXTRAS[name]):
        version = versions[canonicalize_name(each.name)]
        assert each.specifier.contains(version), f"{name}.txt has {each.name} {version}, but {each}: run make locks"


def test_images_are_built_with_what_the_build_asks_for():
    versions = locked("build", PYTHONS[0])
    for each in map(Requirement, PROJECT["build-system"]["requires"]):
        assert each.specifier.contains(versions[canonicalize_name(each.name)]), f"{each}: run make locks"


def test_services_that_speak_to_each_other_have_the_same_versions():
    for python in PYTHONS:
        found = {}
        for name in (*EXTRAS, "build"):
            for package, version in locked(name, python).items():
                if not re.match("(nvidia|cuda)-", package):  # each of the two builds of torch has its own
                    assert found.setdefault(package, version) == version, package


def test_torch_is_the_one_that_is_tested_with_and_only_the_workers_have_it():
    [torch] = [Requirement(each) for each in PROJECT["project"]["optional-dependencies"]["dev"] if "torch==" in each]
    for name in LOCKS:
        version = locked(name, PYTHONS[0]).get("torch")
        assert torch.specifier.contains(version) if name.startswith("worker") else version is None


def test_every_package_has_hashes_and_no_lock_says_where_to_get_it():
    for name, text in LOCKS.items():
        packages = re.split(r"(?m)^(?=[^\s#])", text)[1:]
        assert packages, name
        assert all(re.fullmatch(r"[^\n]+ \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", each) for each in packages)
        assert not re.search(r"://|--index|--find-links|--extra", text)


@pytest.mark.parametrize("service", ["gateway", "scheduler", "worker"])
def test_an_image_installs_nothing_that_is_not_locked(service: str):
    text = (ROOT / "docker" / f"{service}.Dockerfile").read_text().replace("\\\n", " ")
    installs = re.findall(r"pip (?:install|wheel) .*?(?=&&|\|\||\)|;|\n)", text)
    chosen = [each for each in installs if "${TORCH}" in each]  # who builds may put another build in torch's place
    assert len(chosen) == (service == "worker")
    for each in set(installs) - set(chosen):
        assert "--no-deps" in each
        assert {"--require-hashes", "--no-index", "--no-build-isolation"} & set(each.split())
    used = set(re.findall(r"(?:/locks/|LOCK=|--requirement )([a-z][a-z-]+)", text))
    assert {"build", *(name for name in EXTRAS if name.startswith(service))} <= used <= set(LOCKS)


def test_python_is_pinned_to_the_patch():
    texts = [overlay(ComposeConfig()), *(file.read_text() for file in (ROOT / "docker").glob("*.Dockerfile"))]
    images = [image for text in texts for image in re.findall(r"PYTHON_IMAGE[=:] ?(\S+)", text)]
    assert {re.fullmatch(r"python:(\d+\.\d+\.\d+)-slim-\w+", image)[1] for image in images} == set(PYTHONS)


def audit(tmp_path: Path, answer: str) -> subprocess.CompletedProcess:
    """``docker/audit.py`` with a service that answers so."""
    tool = tmp_path / "pip-audit"
    tool.write_text(f"#!{sys.executable}\nimport sys\nwanted = open(sys.argv[-1]).read().split()\n{answer}\n")
    tool.chmod(0o755)
    command = [sys.executable, str(ROOT / "docker" / "audit.py"), str(tool)]
    return subprocess.run(command, capture_output=True, text=True)


def said(vulns: str = "[]", among: str = "True") -> str:
    """The answer, as a program, about ``each`` package that is ``among`` those it knows."""
    return (
        "import json\npairs = [each.split('==') for each in wanted]\nprint(json.dumps({'dependencies': ["
        f"{{'name': name, 'version': version, 'vulns': {vulns}}} if {among} else {{'name': name, 'skip_reason': '?'}}"
        " for name, version in pairs]}))"
    )


def test_an_audit_passes_where_nothing_is_known(tmp_path):
    outcome = audit(tmp_path, said())
    count = len(
        {(name, version) for lock in LOCKS.values() for name, version in re.findall(r"(?m)^(\S+)==(\S+)", lock)}
    )
    assert (outcome.returncode, outcome.stdout) == (0, f"audit: {count} packages, no known defect\n")


def test_an_audit_names_defects_and_the_images_that_have_them(tmp_path):
    defect = json.dumps([{"id": "X-1", "fix_versions": ["99"]}])
    outcome = audit(tmp_path, said(f"{defect} if name == 'uvicorn' else []"))
    assert outcome.returncode == 1
    assert re.search(r"^uvicorn \S+ \(gateway\): X-1, fixed in 99$", outcome.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "answer",
    [said(among="name != 'tqdm'"), "sys.exit('no route to host')", "print('{}')", "print('{\"dependencies\": []}')"],
    ids=["one unknown", "unreachable", "no answer", "all unknown"],
)
def test_an_audit_that_did_not_happen_does_not_pass(tmp_path, answer):
    outcome = audit(tmp_path, answer)
    assert outcome.returncode == 2
    assert "audit: " in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_the_locks_are_made_from_the_same_extras():
    spec = importlib.util.spec_from_file_location("lock", ROOT / "docker" / "lock.py")
    lock = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(lock)
    assert lock.EXTRAS == EXTRAS
    assert set(LOCKS) == {*EXTRAS, "build", "torch-cuda"}
