"""Nothing that a service reads is run: no pickle and its like, no code of models, no eval."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "services"
# Modules whose formats are programs.
MODULES = ("pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
CALLS = ("eval", "exec", "compile", "__import__")
# Of these the safe ways are named: torch.load(weights_only=True), numpy's without pickles, yaml.safe_load.
LOADERS = {"torch.load": ("weights_only", True), "np.load": ("allow_pickle", False), "yaml.load": ("Loader", None)}


def name_of(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{name_of(value)}.{name}"
    return ""


def breaches(source: str) -> list[str]:
    """What is wrong in a program, by line."""
    found = []

    def breach(node: ast.AST, what: str) -> None:
        found.append(f"{node.lineno}: {what}")

    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                for name in names:
                    if name.name.partition(".")[0] in MODULES:
                        breach(node, f"import {name.name}")
            case ast.ImportFrom(module=str() as module, names=names):
                if module.partition(".")[0] in MODULES:
                    breach(node, f"from {module} import")
                if module == "torch" and any(name.name == "load" for name in names):
                    breach(node, "from torch import load")
            case ast.Call(func=called, keywords=keywords):
                given = {keyword.arg: keyword.value for keyword in keywords}
                name = name_of(called)
                if name in CALLS:
                    breach(node, f"{name}()")
                if name in LOADERS:
                    keyword, safe = LOADERS[name]
                    value = given.get(keyword)
                    if not (isinstance(value, ast.Constant) and value.value is safe):
                        breach(node, f"{name}() without {keyword}={safe}")
                trusted = given.get("trust_remote_code")
                if trusted is not None and not (isinstance(trusted, ast.Constant) and trusted.value is False):
                    breach(node, "trust_remote_code")
                allowed = given.get("allow_pickle")
                if allowed is not None and not (isinstance(allowed, ast.Constant) and allowed.value is False):
                    breach(node, "allow_pickle")
                if isinstance(given.get("shell"), ast.Constant) and given["shell"].value is True:
                    breach(node, "shell=True")
            case ast.Constant(value="trust_remote_code"):
                breach(node, "trust_remote_code in a string")
    return found


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import pickle", True),
        ("import os, marshal as m", True),
        ("from pickle import loads", True),
        ("import torch\ntorch.load(x)", True),
        ("torch.load(x, weights_only=False)", True),
        ("torch.load(x, weights_only=True)", False),
        ("from torch import load", True),
        ("np.load(x, allow_pickle=True)", True),
        ("np.load(x)", True),
        ("np.frombuffer(x)", False),
        ("yaml.load(x)", True),
        ("yaml.safe_load(x)", False),
        ("eval(x)", True),
        ("model.eval()", False),
        ("re.compile(x)", False),
        ("f(trust_remote_code=True)", True),
        ("f(**{'trust_remote_code': True})", True),
        ("f(trust_remote_code=False)", False),
        ("subprocess.run(x, shell=True)", True),
    ],
)
def test_the_search_finds_what_it_looks_for(source, wrong):
    assert bool(breaches(source)) is wrong


def test_no_service_runs_what_it_reads():
    programs = sorted(ROOT.rglob("*.py"))
    assert len(programs) > 100
    found = {str(path.relative_to(ROOT)): wrong for path in programs if (wrong := breaches(path.read_text()))}
    # The one place that names the flag: to refuse it.
    [refusal] = found.pop("common/config/original.py")
    assert "trust_remote_code in a string" in refusal
    assert found == {}
