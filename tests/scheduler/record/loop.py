"""The least that records a run: the core, a fake worker's model, and the recorder between them."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from services.common.plan.codec import decode_limits, decode_result, encode_plan
from services.common.plan.types import SamplingSettings
from services.scheduler.core.memory.hydragen import HydragenPolicy
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import AdmissionMode, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.record.reader import RecordedStep, Recording, find_recordings
from services.scheduler.record.recorder import Recorder
from tests.fakes.model import FakeModel, FakeShape
from tokasaurus.common.v1.sampling_pb2 import Sampling

SHAPE = FakeShape(vocab_size=64, page_size=4, page_count=64, max_slots=8, max_tokens_per_step=24, max_context_tokens=64)
# Small groups pay: so that they are in the recordings.
EAGER = HydragenPolicy(min_group_size=2, min_prefix_len=4, row_cost=0, group_cost=0, call_cost=0)
STEPS_AHEAD = 3
SINK = 1


class RecordedLoop:
    """Plans go out until ``STEPS_AHEAD`` are in flight, then one answer comes back."""

    def __init__(self, directory: Path, shape: FakeShape = SHAPE, **policy) -> None:
        self.directory = directory
        self.shape = shape
        self.recorder = Recorder(str(directory))
        policy = {"mode": AdmissionMode.GUARANTEED, "steps_ahead": STEPS_AHEAD, **policy}
        self.core = Scheduler([b"a"] * shape.vocab_size, shape.vocab_size, Policy(**policy))
        self.core.open_sink(SINK)
        self.handles = 0
        self.now = 0
        self.connect()

    def connect(self) -> None:
        info = self.shape.worker_info()
        self.model, self.in_flight = FakeModel(self.shape), deque()
        self.core.attach(decode_limits(info))
        self.recorder.connected(info, STEPS_AHEAD)

    def lose_worker(self, reason: str) -> None:
        self.core.detach()
        self.recorder.disconnected(reason)
        self.connect()

    def submit(self, request_id: str, tokens, max_tokens: int, n: int = 1) -> int:
        request = Request(request_id, np.array(tokens, np.uint32), SamplingSettings(Sampling(seed=7)), max_tokens)
        request.n, request.sink, request.handle = n, SINK, self.handles
        self.core.submit(request, self._tick())
        self.handles += n
        return request.handle

    def step(self) -> None:
        while (plan := self.core.plan(self._tick())) is not None:
            message = encode_plan(plan)
            self.recorder.plan(message, plan.admitted_ids, plan.released_ids)
            self.in_flight.append(self.model.apply(message))
        if self.in_flight:
            answer = self.in_flight.popleft()
            self.recorder.result(answer)
            self.core.take(decode_result(answer), self._tick())
        self.core.take_output()

    def run(self) -> None:
        """Until everything is finished and every plan is answered."""
        while self.core.live(SINK) or self.in_flight:
            self.step()

    def close(self) -> list[Recording]:
        self.recorder.close()
        return open_recordings(str(self.directory))

    def _tick(self) -> int:
        self.now += 1
        return self.now


def open_recordings(path: str) -> list[Recording]:
    """All in ``path``, none of them damaged at its beginning."""
    return [Recording(found) for found in find_recordings(path)]


def record_small_run(directory: Path) -> Recording:
    """Two requests: five samples of one prompt, grouped and cut into two micro-batches, and a longer prompt."""
    loop = RecordedLoop(directory, hydragen=EAGER, micro_batches=2)
    loop.submit("many", range(2, 17), 9, n=5)
    loop.submit("long", range(10, 50), 6)
    loop.run()
    loop.submit("again", [*range(2, 17), 20, 21], 3)
    loop.run()
    (recording,) = loop.close()
    return recording


def rewrite(recording: Recording, directory: Path, mutate: Callable[[RecordedStep], None]) -> Recording:
    """The same recording, each step changed by ``mutate``."""
    recorder = Recorder(str(directory))
    recorder.connected(recording.info, recording.connected.plans_in_flight)
    for step in recording.steps():
        mutate(step)
        recorder.plan(step.plan.plan, step.plan.admitted_ids, step.plan.released_ids)
        if step.result is not None:
            recorder.result(step.result.result)
    recorder.close()
    (made,) = open_recordings(str(directory))
    return made
