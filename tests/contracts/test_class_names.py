"""A class name has one meaning: no two public classes of the services have the same."""

import ast
from collections import defaultdict
from pathlib import Path

SERVICES = Path(__file__).parents[2] / "services"


def test_no_two_public_classes_have_the_same_name():
    places = defaultdict(list)
    for path in sorted(SERVICES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path.relative_to(SERVICES)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
