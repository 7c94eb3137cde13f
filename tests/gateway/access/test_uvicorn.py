"""The gateway overrides methods and sets attributes of uvicorn that are not public, so its version is pinned.

Public seams do not suffice: uvicorn has no timeout for a request that arrives slowly, no limit for its headers, and no
error body of the application's own. Before the version changes, compare the sources of these classes with those of the
old version, adapt ``services/gateway/http``, and write the new digests here.
"""

import hashlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server, ServerState

PROJECT = Path(__file__).parents[3] / "pyproject.toml"
DIGESTS = {
    HttpToolsProtocol: "18fdf324b11bf160",
    RequestResponseCycle: "e67d470d435dcc1c",
    FlowControl: "126debcdaa894c83",
    Server: "06e799f7c58f8be6",
    ServerState: "f2260fbf10154746",
}


@pytest.mark.parametrize("kind", DIGESTS, ids=lambda kind: kind.__name__)
def test_the_classes_that_the_gateway_builds_on_are_those_it_was_written_for(kind):
    digest = hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    assert digest == DIGESTS[kind], f"{kind.__name__} of uvicorn {uvicorn.__version__} differs: see the docstring"


def test_the_installed_uvicorn_is_the_pinned_one():
    needed = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["gateway"]
    [pinned] = [match[1] for each in needed if (match := re.fullmatch(r"uvicorn==([\d.]+)", each))]
    assert uvicorn.__version__ == pinned
