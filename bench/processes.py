"""The CPU seconds of the processes of a deployment, by service."""

import psutil


class Usage:
    """The CPU use of process ``pid`` and its descendants. Processes that start later are not counted.

    The name of a process is the last part of its Python module (``gateway``, ``scheduler``...), or its parent's name.
    Processes with the same name are added up.
    """

    def __init__(self, pid: int) -> None:
        self._processes: list[tuple[str, psutil.Process]] = []
        self._find(psutil.Process(pid), "")

    def seconds(self) -> dict[str, float]:
        """Return the user and system seconds so far, by name."""
        found: dict[str, float] = {}
        for name, process in self._processes:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            found[name] = found.get(name, 0.0) + times.user + times.system
        return found

    def _find(self, process: psutil.Process, inherited: str) -> None:
        try:
            name = _module(process.cmdline()) or inherited
            children = process.children()
        except psutil.NoSuchProcess:
            return
        if name:
            self._processes.append((name, process))
        for child in children:
            self._find(child, name)


def _module(command: list[str]) -> str:
    if "-m" not in command[:-1]:
        return ""
    return command[command.index("-m") + 1].rsplit(".", 1)[-1]
