"""Drives the core against the fake model without a socket, and checks its book-keeping after every move."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from services.scheduler.core.output import Delta
from services.scheduler.core.pages import FAR
from services.scheduler.core.plan import Plan
from services.scheduler.core.request import Finish, FinishReason, Request, SamplingSettings, WorkerShape
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.stop_automaton import Automaton
from services.scheduler.workers.codec import decode_result, encode_plan
from tests.fakes.model import FakeModel, FakeShape, continuation

SINK = 1
TOKEN_BYTES = [b"", b"", *(bytes([97 + token % 4, 97 + token % 3]) for token in range(2, 62))]


@dataclass
class Seen:
    """What a client was told about one sample."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


class Driver:
    """The core, a fake worker's model, and the plans between them."""

    def __init__(self, shape: FakeShape, *, steps_ahead: int = 2, prefix_caching: bool = True) -> None:
        self.shape = shape
        self.core = Scheduler(TOKEN_BYTES, shape.vocab_size, steps_ahead=steps_ahead, prefix_caching=prefix_caching)
        self.core.open_sink(SINK)
        self.seen: dict[int, Seen] = {}
        self.requests: dict[int, Request] = {}
        self.next_handle = 0
        self.clock = 0
        self.in_flight: deque = deque()
        self.plans: list[Plan] = []
        self.model: FakeModel
        self.connect()

    def connect(self) -> None:
        shape = self.shape
        self.model = FakeModel(shape)
        self.in_flight.clear()
        self.core.attach(
            WorkerShape(
                shape.page_size, shape.page_count, shape.max_slots, shape.max_tokens_per_step, shape.max_context_tokens,
                shape.vocab_size,
            )
        )  # fmt: skip

    def lose_worker(self) -> None:
        self.core.detach()
        self.connect()
        self.collect()

    def submit(self, tokens, *, n: int = 1, stop: tuple[str, ...] = (), **fields) -> int:
        """Queue a request; returns its handle. What the core refuses is raised."""
        handle = self.next_handle
        request = Request(
            request_id=f"r{handle}",
            tokens=np.array(tokens, np.uint32),
            sampling=fields.pop("sampling", SamplingSettings(seed=7)),
            automaton=Automaton(stop) if stop else None,
            n=n,
            sink=SINK,
            handle=handle,
            **fields,
        )
        self.core.submit(request, self.tick())
        self.next_handle += n
        self.requests[handle] = request
        self.seen |= {handle + index: Seen() for index in range(n)}
        return handle

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def plan(self) -> Plan | None:
        """Build one plan and let the model answer it; the answer stays on its way."""
        plan = self.core.plan(self.tick())
        if plan is not None:
            self.plans.append(plan)
            self.in_flight.append(decode_result(self.model.apply(encode_plan(plan))))
        self.collect()
        return plan

    def answer(self) -> bool:
        """The oldest answer arrives."""
        if not self.in_flight:
            return False
        self.core.take(self.in_flight.popleft(), self.tick())
        self.collect()
        return True

    def step(self) -> None:
        """As many plans as may be in flight, then one answer."""
        while self.plan():
            pass
        self.answer()

    def run(self, most: int = 100_000) -> None:
        """Until everything is finished."""
        for _ in range(most):
            if not self.core.live(SINK):
                return
            self.step()
        raise AssertionError(f"not finished after {most} steps")

    def cancel(self, *handles: int) -> None:
        self.core.cancel(SINK, handles)
        self.collect()

    def collect(self) -> None:
        for sink, delta in self.core.take_output():
            assert sink == SINK
            self._note(delta)
        check(self.core)

    def _note(self, delta: Delta) -> None:
        for handle, token in zip(delta.handles.tolist(), delta.tokens.tolist(), strict=True):
            assert self.seen[handle].finish is None, "a token behind the finish"
            self.seen[handle].tokens.append(token)
        for finish in delta.finished:
            assert self.seen[finish.handle].finish is None, "two finishes"
            self.seen[finish.handle].finish = finish

    def expected(self, handle: int) -> tuple[list[int], FinishReason]:
        """The tokens of a sample that nobody interferes with, and why it ends; worked out naively."""
        request = next(r for r in self.requests.values() if r.handle <= handle < r.handle + r.n)
        index = request.first_sample_index + handle - request.handle
        room = request.limit - len(request.tokens)
        sampling = request.sampling
        tokens = continuation(
            self.shape, request.tokens.tolist(), room, seed=sampling.seed, sample_index=index,
            temperature=sampling.temperature,
        )  # fmt: skip
        before = request.tokens[request.prompt_tokens :].tolist()
        for count in range(1, room + 1):
            generated = before + tokens[:count]
            if len(generated) < request.min_tokens:
                continue
            if tokens[count - 1] in request.stop_token_ids or _stops(request, generated):
                return tokens[:count], FinishReason.STOP
        return tokens, FinishReason.LENGTH


def _stops(request: Request, generated: list[int]) -> bool:
    """Whether a stop string ends within the last of these tokens."""
    if request.automaton is None:
        return False
    text = b"".join(TOKEN_BYTES[token] for token in generated)
    fresh = len(TOKEN_BYTES[generated[-1]])
    return any(
        text[: len(text) - back].endswith(pattern) for pattern in request.automaton.patterns for back in range(fresh)
    )


def check(core: Scheduler) -> None:
    """Every page has exactly its holders, and every count is what it counts."""
    state, pool, slots = core.state, core.state.pool, core.state.slots
    held, ends = Counter(), {}
    for slot in np.flatnonzero(slots.active).tolist():
        pages = slots.pages(slot).tolist()
        assert len(set(pages)) == len(pages)
        held.update(pages)
        for page in pages:
            ends[page] = max(ends.get(page, -1), int(slots.end_step[slot]))
    for pages in state.sharing.values():
        held.update(pages.tolist())
        ends |= dict.fromkeys(pages.tolist(), FAR)
    assert held == Counter({page: int(refs) for page, refs in enumerate(pool.refs) if refs})
    free = pool._free[: pool.free].tolist()
    assert len(set(free)) == len(free)
    assert not set(free) & set(held)
    assert not pool.registered[free].any()
    cached = set(np.flatnonzero(pool.registered & (pool.refs == 0)).tolist())
    assert len(free) + len(held) + len(cached) == pool.size
    assert (pool.free, pool.in_use, pool.cached) == (len(free), len(held), len(cached))
    if not pool.ends_stale:
        assert ends == {page: int(pool.ends[page]) for page in ends}
    else:
        assert all(end <= pool.ends[page] for page, end in ends.items())
    waiting = list(state.waiting)
    assert state.waiting.tokens == sum(sample.outstanding for sample in waiting)
    assert all(sample.slot < 0 and not sample.finished for sample in waiting)
    assert slots.running == np.count_nonzero(slots.active)
    assert len(waiting) + slots.running == core.live(SINK)
    assert state.counters.preemptions == 0
