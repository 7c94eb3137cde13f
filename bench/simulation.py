"""A simulation of a trace: the scheduler's core with a simulated worker, without a model, sockets or a clock."""

from collections import deque

import numpy as np

from bench.traces import END, VOCAB_SIZE, Trace
from services.common.plan.result import StepResult
from services.common.plan.types import NO_ROWS, Admission, SamplingSettings, WorkerLimits
from services.scheduler.core.future.admission import AdmissionControl
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import AdmissionMode, Finish, FinishReason, Request
from services.scheduler.core.scheduler import Scheduler
from tokasaurus.common.v1.sampling_pb2 import Sampling

SINK = 1
STEP_NS = 20_000_000  # simulated duration of a step, for the core's clock
_TOKEN_BYTES = [b"x"] * VOCAB_SIZE
_ODD = np.uint64(0x9E3779B97F4A7C15)


class SimulatedWorker:
    """A worker that answers every plan at once with random tokens, and with ``END`` at the length of the trace.

    The seed of an admission is the number of the request in the trace, which identifies the sample.
    """

    def __init__(self, trace: Trace, slots: int) -> None:
        self._trace = trace
        # By slot: known tokens that are not computed, tokens of the answer, and the final length of the answer.
        self._missing, self._generated, self._target = np.zeros((3, slots), np.int64)
        self._stream = np.zeros(slots, np.uint64)  # seed of its tokens, the same after a preemption
        self._batch = NO_ROWS

    def answer(self, plan: PlannedStep) -> StepResult:
        for admission in plan.admissions:
            self._admit(admission)
        if plan.batch is not None:
            self._batch = plan.batch
        slots = self._batch.slots
        self._missing[slots] -= self._batch.token_counts
        rows = slots[self._missing[slots] <= 0]
        self._missing[rows] = 0
        self._generated[rows] += 1
        tokens = np.where(self._generated[rows] == self._target[rows], END, self._ordinary_tokens(rows))
        return StepResult(plan.step, rows, tokens)

    def _admit(self, admission: Admission) -> None:
        slot, number, sample = admission.slot, admission.sampling.parameters.seed, admission.sample_index
        request, known = self._trace.requests[number], len(admission.token_ids)
        self._missing[slot] = known - admission.cached_tokens
        self._generated[slot] = known - len(request.tokens)
        self._target[slot] = request.lengths[sample]
        self._stream[slot] = number << 20 | sample

    def _ordinary_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Return a hash of request, sample and position, so that answers share no pages."""
        mixed = (self._stream[rows] << np.uint64(20) | self._generated[rows].astype(np.uint64)) * _ODD
        mixed = (mixed ^ mixed >> np.uint64(31)) * _ODD
        return (mixed >> np.uint64(40)).astype(np.int64) % (VOCAB_SIZE - 1) + 1


class Simulation:
    """The core and its worker, with as many plans in flight as the core allows. All requests are queued at the start.

    Raises ``RuntimeError`` if a sample has another length than in the trace, or if pages run out.
    """

    def __init__(
        self,
        trace: Trace,
        shape: WorkerLimits,
        mode: AdmissionMode,
        admission: type[AdmissionControl] = AdmissionControl,
    ) -> None:
        self.lengths = trace.lengths
        self.finished = np.zeros(len(self.lengths), bool)  # by handle, the index of the sample in the trace
        policy = Policy(mode=mode, max_queued=len(self.lengths))
        self.core = Scheduler(_TOKEN_BYTES, VOCAB_SIZE, policy, admission=admission)
        self.core.open_sink(SINK)
        self.core.attach(shape)
        self._worker = SimulatedWorker(trace, shape.max_slots)
        self._answers: deque[StepResult] = deque()
        self._now_ns = STEP_NS
        handle = 0
        for number, asked in enumerate(trace.requests):
            request = Request(f"r{number}", asked.tokens, SamplingSettings(Sampling(seed=number)), asked.max_tokens)
            request.stop_token_ids, request.n = frozenset({END}), len(asked.lengths)
            request.sink, request.handle = SINK, handle
            handle += request.n
            self.core.submit(request, self._now_ns)

    def step(self) -> PlannedStep | None:
        """Return the next plan, or None if every sample has finished."""
        pool = self.core.state.pool.pages
        while not self.finished.all():
            plan = self.core.plan(self._now_ns)
            if plan is None:
                self._take_answer()
                continue
            if pool.in_use > pool.size:
                raise RuntimeError(f"step {plan.step}: {pool.in_use} pages are in use and there are {pool.size}")
            self._answers.append(self._worker.answer(plan))
            self._now_ns += STEP_NS
            return plan
        return None

    def _take_answer(self) -> None:
        """Pass the oldest result to the core."""
        if not self._answers:
            raise RuntimeError(f"{self.core.live(SINK)} samples are left, and the scheduler plans nothing")
        self.core.take(self._answers.popleft(), self._now_ns)
        for _, delta in self.core.take_output():
            for finish in delta.finished:
                self._finish(finish)

    def _finish(self, finish: Finish) -> None:
        expected = self.lengths[finish.handle]
        if finish.reason not in (FinishReason.STOP, FinishReason.LENGTH) or finish.completion_tokens != expected:
            raise RuntimeError(f"sample {finish.handle} should have ended with {expected} tokens: {finish}")
        if self.finished[finish.handle]:
            raise RuntimeError(f"sample {finish.handle} ended twice")
        self.finished[finish.handle] = True
