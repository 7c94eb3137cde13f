"""Shells really complete the flags of toka, from what it prints."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.common.config import DeploymentConfig
from services.common.config.completion import completion
from services.common.config.flag import flags_of
from services.common.flags import FlagError
from services.launcher.download import DownloadConfig
from services.launcher.ping import PingConfig

PATIENCE_S = 60.0


def script(shell: str, path: Path) -> Path:
    path.write_text(completion("toka", shell, {"": DeploymentConfig}))
    return path


class Terminal:
    """An interactive shell in a terminal."""

    def __init__(self, *command: str, directory: Path) -> None:
        child, self._terminal = pty.fork()
        if child == 0:
            os.chdir(directory)
            home = {"TERM": "dumb", "HOME": str(directory), "PATH": os.environ["PATH"], "PS1": "> "}
            os.execvpe(command[0], list(command), home)
        self._child = child
        self._seen = ""

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def read_until(self, pattern: str) -> str:
        """Wait until the shell shows ``pattern``. Return its first group."""
        give_up_at = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self._seen)) is None:
            assert select.select([self._terminal], [], [], give_up_at - time.monotonic())[0], self._seen
            self._seen += os.read(self._terminal, 4096).decode(errors="replace")
        self._seen = self._seen[found.end() :]
        return found[1]

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._child, 0)


@pytest.fixture
def terminal(request):
    opened = []

    def open_shell(*command: str, directory: Path) -> Terminal:
        if shutil.which(command[0]) is None:
            pytest.skip(f"needs {command[0]}")
        opened.append(Terminal(*command, directory=directory))
        return opened[-1]

    yield open_shell
    for each in opened:
        each.close()


# In the place of toka: says what it was given.
SAY = "toka() { printf 'given'; printf ' <%s>' \"$@\"; echo .; }\n"


@pytest.mark.parametrize(
    ("command", "prepare"),
    [
        (("bash", "--norc", "--noprofile", "-i"), ""),
        (("bash", "--norc", "--noprofile", "-i"), "COMP_WORDBREAKS=${COMP_WORDBREAKS/=/}\n"),
        (("zsh", "-f", "-i"), "autoload -U compinit; compinit -u -D\n"),
    ],
    ids=["bash", "bash without =", "zsh"],
)
def test_names_values_and_files_are_completed_at_the_key(command, prepare, terminal, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Llama").write_text("")
    file = script(command[0], tmp_path / "completion")
    shell = terminal(*command, directory=tmp_path)
    shell.type(f"{prepare}. {file}\n{SAY}echo rea''dy\n")
    shell.read_until("(ready)")
    shell.type("toka kv_cache_d\tf\t tp_s\t2 use_h\tT model=mod\tLl\t\n")
    shown = shell.read_until(r"given (.*)\.\r?\n")
    assert shown.split() == ["<kv_cache_dtype=fp8>", "<tp_size=2>", "<use_hydragen=T>", "<model=models/Llama>"]


@pytest.mark.parametrize(
    ("command", "prepare"),
    [
        (("bash", "--norc", "--noprofile", "-i"), ""),
        (("bash", "--norc", "--noprofile", "-i"), "COMP_WORDBREAKS=${COMP_WORDBREAKS/=/}\n"),
        (("zsh", "-f", "-i"), "autoload -U compinit; compinit -u -D\n"),
    ],
    ids=["bash", "bash without =", "zsh"],
)
def test_options_and_the_values_behind_them_are_completed_at_the_key(command, prepare, terminal, tmp_path):
    (tmp_path / "Llama").write_text("")
    file = script(command[0], tmp_path / "completion")
    shell = terminal(*command, directory=tmp_path)
    shell.type(f"{prepare}. {file}\n{SAY}echo rea''dy\n")
    shell.read_until("(ready)")
    shell.type("toka --kv-cache-d\tf\t --devi\tcu\t --dtype flo\t32 --model Ll\t --watchd\t tp_s\t2\n")
    shown = shell.read_until(r"given (.*)\.\r?\n")
    expected = "<--kv-cache-dtype=fp8> <--device=cuda> <--dtype> <float32> <--model> <Llama> <--watchdog> <tp_size=2>"
    assert shown == expected


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_commands_and_their_own_flags_are_completed(shell, terminal, tmp_path):
    file = tmp_path / "completion"
    file.write_text(completion("toka", shell, {"ping": PingConfig, "fetch": DownloadConfig}))
    command = ("bash", "--norc", "--noprofile", "-i") if shell == "bash" else ("zsh", "-f", "-i")
    opened = terminal(*command, directory=tmp_path)
    start = "autoload -U compinit; compinit -u -D\n" if shell == "zsh" else ""
    opened.type(f"{start}. {file}\n{SAY}echo rea''dy\n")
    opened.read_until("(ready)")
    opened.type("toka pi\t --ht\tmax_t\t7\n")
    assert opened.read_until(r"given (.*)\.\r?\n") == "<ping> <--https> <max_tokens=7>"


def test_bash_offers_every_name_and_every_choice(tmp_path):
    file = script("bash", tmp_path / "completion")

    def offered(line: str) -> list[str]:
        program = f'. {file}; COMP_LINE="{line}" COMP_POINT={len(line)}; _toka; printf "%s\\n" "${{COMPREPLY[@]}}"'
        shell = ["bash", "--norc", "-c", program]
        return subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split()

    names = [f"{flag.name}=" for flag in flags_of(DeploymentConfig)]
    assert offered("toka ") == [*names, "help"]
    assert sorted(offered("toka tp_size=2 log_")) == ["log_format=", "log_level=", "log_prompts="]
    assert offered("toka device=") == ["auto", "cpu", "cuda"]
    assert offered("toka torch_compile=") == ["auto", "T", "F"]
    assert offered("toka watchdog=") == ["T", "F"]
    assert offered("toka port=") == []
    assert sorted(offered("toka --log-")) == ["--log-format=", "--log-level=", "--log-prompts"]
    assert offered("toka --watchdog ")[0] == names[0]
    assert offered("toka --torch-compile=") == ["auto", "T", "F"]
    assert offered("toka --log-format ") == ["auto", "json", "console"]


def test_fish_completes_with_what_each_flag_means(tmp_path):
    if shutil.which("fish") is None:
        pytest.skip("needs fish")
    file = script("fish", tmp_path / "completion")
    (tmp_path / "Llama").write_text("")

    def offered(line: str) -> list[str]:
        program = f'source {file}; cd {tmp_path}; complete -C "{line}"'
        environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        shell = ["fish", "--no-config", "-c", program]
        return subprocess.run(shell, capture_output=True, text=True, check=True, env=environment).stdout.splitlines()

    assert "tp_size=\ttensor-parallel ranks of a replica" in offered("toka tp")
    assert [each.partition("\t")[0] for each in offered("toka device=")] == ["device=auto", "device=cpu", "device=cuda"]
    assert [each.partition("\t")[0] for each in offered("toka model=Ll")] == ["model=Llama"]
    assert "--tp-size\ttensor-parallel ranks of a replica" in offered("toka --tp")
    assert [each.partition("\t")[0] for each in offered("toka --device c")] == ["cpu", "cuda"]
    assert [each.partition("\t")[0] for each in offered("toka --model=Ll")] == ["--model=Llama"]


def test_flags_that_toka_would_refuse_are_not_offered():
    names = {flag.name for flag in flags_of(DeploymentConfig)}
    assert DeploymentConfig.refused.keys().isdisjoint(names)
    assert names == set(DeploymentConfig.model_fields)


def test_a_shell_that_is_not_known_is_refused():
    with pytest.raises(FlagError, match="expected one of bash, zsh, fish"):
        completion("toka", "tcsh", {"": DeploymentConfig})


@pytest.mark.parametrize("spelling", [("--completion", "bash"), ("--completion=bash",)])
def test_every_program_prints_its_own(spelling):
    program = "import sys; sys.argv[0] = 'toka-ping'; from services.launcher.ping import main; main()"
    command = [sys.executable, "-c", program, *spelling]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "complete -F _toka_ping toka-ping" in done.stdout
    assert "timeout_s=" in done.stdout
