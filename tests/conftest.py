"""Loaded before any test module, and so before anything that imports triton."""

import os
from collections.abc import Iterator

import pytest
import torch
from xdist.scheduler import LoadFileScheduling

from tests.common.rpc.authority import Authority
from tests.properties import register_profiles
from tests.worker.interpreter import DEVICE, triton_ready

__all__ = ["triton_ready"]

register_profiles()

if "PYTEST_XDIST_WORKER" in os.environ:
    # There is a process for each core: threads of torch would wait for each other, which they do by computing.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Of ``-n auto``, as ``make test`` has it. Tests of a GPU take all of its memory; others start many processes."""
    return 0 if DEVICE.type == "cuda" else 3


# Folders whose files share servers that take long to start: one process runs all files of a folder.
FIRST = ("tests/gateway/grammar", "tests/worker/parallel")
TOGETHER = (*FIRST, *(f"tests/gateway/{name}" for name in ("access", "console", "messages", "rollout")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest folders of ``TOGETHER`` first: the other processes would have nothing to do at the end."""
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log) -> LoadFileScheduling | None:
    """Of ``--dist loadfile``: files in the order of their folders, so that what a folder shares ends with it."""
    if config.getvalue("dist") != "loadfile":
        return None
    config.option.loadscopereorder = False

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            folder = file.rpartition("/")[0]
            return folder if folder in TOGETHER else file

    return Scheduling(config, log)


@pytest.fixture(scope="session", autouse=True)
def store_of_this_session(tmp_path_factory) -> Iterator[None]:
    """Servers keep files and batches here that are not told where: not where this user's own do."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(os.environ, "TOKA_STORE_DIR", str(tmp_path_factory.mktemp("store")))
        yield


@pytest.fixture(scope="session", autouse=True)
def one_certificate_authority(tmp_path_factory) -> Iterator[None]:
    """Make HTTP clients of this session cheap: each reads the trusted authorities, and the usual list takes 20 ms."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SSL_CERT_FILE", str(authority.cert))
        yield
