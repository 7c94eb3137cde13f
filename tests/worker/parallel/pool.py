"""Processes that stand for a replica's workers: spawned once, given one job after the other."""

import contextlib
import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch

from services.worker.described.ranks import Ranks

# Longer than any job takes on a busy machine; one that hangs must not take the whole test's time.
JOB_S = 240.0
# What the others get to notice that one has failed.
_GRACE_S = 10.0


class Member:
    """One process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """``environment``: what it has beside this process' variables."""
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(there,), daemon=True)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            self.process.start()
        there.close()

    def ask(self, job: Callable[..., Any], *arguments: Any) -> None:
        self.pipe.send_bytes(pickle.dumps((job, arguments)))

    def answer(self) -> Any:
        """What the job returned, or the exception that it raised."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except EOFError as error:
            return error

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class RankPool:
    """Processes, one for each of ``environments``. A job is a function, importable by name, that all ranks of a grid
    call and that takes up to ``job_s``."""

    def __init__(self, *environments: Mapping[str, str], job_s: float = JOB_S) -> None:
        self._environments, self._job_s = environments, job_s
        self.members = [Member(each) for each in environments]

    def run(self, job: Callable[..., Any], tp_size: int, pp_size: int, *arguments: Any) -> list[Any]:
        """What ``job(ranks, *arguments)`` returned on each rank, by their index. Raises the first failure."""
        grid = [Ranks(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
        for ranks in grid:
            self.members[ranks.index].ask(job, ranks, *arguments)
        answers: dict[int, Any] = {}
        failures = []
        while len(answers) < len(grid):
            waiting = {self.members[ranks.index].pipe: ranks.index for ranks in grid if ranks.index not in answers}
            ready = wait(list(waiting), _GRACE_S if failures else self._job_s)
            for pipe in ready:
                answers[waiting[pipe]] = self.members[waiting[pipe]].answer()
            failures = [answer for answer in answers.values() if isinstance(answer, Exception)]
            if not ready:
                for index in waiting.values():
                    self.kill(index)
                names = ", ".join(grid[index].name() for index in waiting.values())
                raise failures[0] if failures else TimeoutError(f"{names} did not answer within {self._job_s} s")
        if failures:
            raise failures[0]
        return [answers[index] for index in range(len(grid))]

    def ask(self, job: Callable[..., Any], ranks: Ranks, *arguments: Any) -> Any:
        """What the job returned on one rank, or the exception that it raised."""
        self.members[ranks.index].ask(job, ranks, *arguments)
        return self.answer(ranks)

    def answer(self, ranks: Ranks) -> Any:
        """To what its process was asked."""
        member = self.members[ranks.index]
        if not member.pipe.poll(self._job_s):
            self.kill(ranks.index)
            raise TimeoutError(f"{ranks.name()} did not answer within {self._job_s} s")
        return member.answer()

    def kill(self, index: int) -> None:
        """End the process of a rank; another one takes its place in the pool."""
        self.members[index].close()
        self.members[index] = Member(self._environments[index])

    def close(self) -> None:
        """End the processes."""
        for member in self.members:
            member.close()


def _serve(pipe) -> None:
    torch.set_num_threads(1)  # there are more processes than cores
    with contextlib.suppress(EOFError, OSError):
        while True:
            job, arguments = pickle.loads(pipe.recv_bytes())
            try:
                answer = job(*arguments)
            except Exception as error:
                error.add_note(traceback.format_exc())
                answer = error
            pipe.send_bytes(pickle.dumps(answer))
