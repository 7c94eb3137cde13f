import os
import subprocess
import sys

import pytest
import structlog

from services.common.host.private_files import OTHERS, WRITING, warn_if_shared

UMASKS = """
import os, pathlib, sys
from services.common.host.private_files import keep_files_private, usual_permissions, usual_umask
assert usual_umask() == -1
keep_files_private()
keep_files_private()
pathlib.Path("private").touch()
with usual_permissions():
    pathlib.Path("usual").touch()
pathlib.Path("later").touch()
assert usual_umask() == 0o022, usual_umask()
"""


@pytest.fixture
def shared(tmp_path):
    """A directory that other users may enter, with a file that they may read."""
    tmp_path.chmod(0o755)
    directory = tmp_path / "the store"
    directory.mkdir(mode=0o755)
    (directory / "file").touch(mode=0o644)
    return directory


def warned(*arguments) -> list[str]:
    with structlog.testing.capture_logs() as lines:
        warn_if_shared("the store", *arguments)
    return [line["fix"] for line in lines]


def test_permissions_of_other_users_are_named_with_the_command_that_takes_them_away(shared):
    fixes = warned([shared, shared / "file", shared / "none"], OTHERS)
    assert fixes == [f"chmod go= '{shared}' '{shared / 'file'}'"]
    subprocess.run(fixes[0], shell=True, check=True)
    assert warned([shared, shared / "file"], OTHERS) == []


def test_files_that_cannot_be_reached_do_not_count(shared):
    shared.chmod(0o700)
    assert warned([shared, shared / "file"], OTHERS) == []


def test_readers_of_what_is_no_secret_do_not_count(shared):
    assert warned([shared], WRITING) == []
    shared.chmod(0o775)
    assert warned([shared], WRITING) == [f"chmod go-w '{shared}'"]


def test_files_are_private_but_for_those_that_users_share(tmp_path):
    subprocess.run([sys.executable, "-c", UMASKS], cwd=tmp_path, env=os.environ, umask=0o022, check=True)
    modes = {path.name: path.stat().st_mode & OTHERS for path in tmp_path.iterdir()}
    assert modes == {"private": 0, "usual": 0o044, "later": 0}
