"""Drives the core against the fake model without a socket, and checks its book-keeping after every move."""

from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np

from services.common.plan.codec import decode_result, encode_plan
from services.common.plan.types import SamplingSettings, WorkerLimits
from services.scheduler.core.memory.prefix_tree import ROOT, PrefixTree
from services.scheduler.core.output import Delta
from services.scheduler.core.plan import PlannedStep
from services.scheduler.core.policy import Policy
from services.scheduler.core.request import AdmissionMode, Finish, FinishReason, PauseMode, Request
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.stopping.automaton import Automaton
from tests.fakes.model import FakeModel, FakeShape, continuation
from tokasaurus.common.v1.sampling_pb2 import Sampling

SINK = 1
TOKEN_BYTES = [b"", b"", *(bytes([97 + token % 4, 97 + token % 3]) for token in range(2, 62))]


@dataclass
class Seen:
    """The events of one sample that its client received."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None


class Driver:
    """The core, a fake worker's model, and the plans between them."""

    def __init__(self, shape: FakeShape, **policy) -> None:
        """``policy``: fields of `Policy`; sequences are guaranteed unless it says otherwise."""
        self.shape = shape
        policy = Policy(**{"mode": AdmissionMode.GUARANTEED, **policy})
        self.core = Scheduler(TOKEN_BYTES, shape.vocab_size, policy)
        self.core.open_sink(SINK)
        self.seen: dict[int, Seen] = {}
        self.requests: dict[int, Request] = {}
        self.next_handle = 0
        self.clock = 0
        self.in_flight: deque = deque()
        self.plans: list[PlannedStep] = []
        self.model: FakeModel
        self.connect()

    def connect(self) -> None:
        shape = self.shape
        self.model = FakeModel(shape)
        self.in_flight.clear()
        self.core.attach(
            WorkerLimits(
                shape.page_size, shape.page_count, shape.max_slots, shape.max_tokens_per_step, shape.max_context_tokens,
                shape.vocab_size, prompt_logprobs=shape.prompt_logprobs, hydragen=True,
                window_tokens=shape.window_tokens,
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
            request_id=fields.pop("request_id", f"r{handle}"),
            tokens=np.array(tokens, np.uint32),
            sampling=fields.pop("sampling", SamplingSettings(Sampling(seed=7))),
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

    def plan(self, *, light: bool = False) -> PlannedStep | None:
        """Build one plan and let the model answer it; the answer stays on its way."""
        plan = self.core.plan(self.tick(), light=light)
        assert plan is not None or not self.core.stuck
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
        """Build the plans that may be in flight, and take one result."""
        while self.plan():
            pass
        self.answer()

    def run(self, most: int = 100_000) -> None:
        """Run steps until all requests are finished."""
        for _ in range(most):
            if not self.core.live(SINK):
                return
            self.step()
        raise AssertionError(f"not finished after {most} steps")

    def cancel(self, *handles: int) -> None:
        self.core.cancel(SINK, handles)
        self.collect()

    def pause(self, mode: PauseMode, *, recompute: bool = False) -> int:
        aborted = self.core.pause(mode, recompute=recompute)
        self.collect()
        return aborted

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
        """Return the tokens of an undisturbed sample and the reason of its end, computed naively."""
        request = next(r for r in self.requests.values() if r.handle <= handle < r.handle + r.n)
        index = request.first_sample_index + handle - request.handle
        room = request.limit - len(request.tokens)
        sampling = request.sampling.parameters or Sampling()
        temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
        tokens = continuation(
            self.shape, request.tokens.tolist(), room, seed=sampling.seed, sample_index=index,
            temperature=temperature,
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
    """Return whether a stop string ends within the last of these tokens."""
    if request.automaton is None:
        return False
    text = b"".join(TOKEN_BYTES[token] for token in generated)
    fresh = len(TOKEN_BYTES[generated[-1]])
    return any(
        text[: len(text) - back].endswith(pattern) for pattern in request.automaton.patterns for back in range(fresh)
    )


def path_of(tree: PrefixTree, node: int, first: int) -> list[int]:
    """The nodes of a path whose pages from number ``first`` on are held."""
    found = []
    while tree.depth[node] > first:
        found.append(node)
        assert tree.depth[node] - tree.size[node] >= first, "a node that is held in part"
        node = int(tree.parent[node])
    return found


def check(core: Scheduler) -> None:
    """Every page has exactly its holders, and every count is what it counts."""
    state, pool, slots, tree = core.state, core.state.pool.pages, core.state.pool.slots, core.state.pool.tree
    shape = core.state.pool.shape
    nodes = tree.nodes()
    in_tree = {page: node for node, pages in nodes.items() for page in pages.tolist()}
    assert len(in_tree) == sum(int(tree.size[node]) for node in nodes), "a page in two nodes"
    users, owners = Counter(), Counter()
    for slot in np.flatnonzero(slots.active).tolist():
        pages, node, first = slots.pages(slot).tolist(), int(slots.node[slot]), int(slots.left_behind[slot])
        depth = int(tree.depth[node])
        assert len(set(pages[first:])) == len(pages) - first
        assert first >= depth or pages[first:depth] == tree.path(node).tolist()[first - depth :]
        assert node == ROOT or first < depth
        owners.update(pages[max(first, depth) :])
        users.update(path_of(tree, node, first))
        assert first <= shape.pages_left_behind(slots.scheduled[slot])
        if shape.window_tokens:
            known = slots.tokens[slot, first * shape.page_size : slots.known[slot]]
            held = pool.tokens[pages[first:]].ravel()[: len(known)]
            assert held.tolist() == known[: len(held)].tolist()
    for request in state.pool.sharing:
        share = request.share
        if share.ready_step:
            users.update(path_of(tree, share.node, 0))
        if share.owns_last_page:
            owners[share.last_page] += 1
        assert request.waiting, "a share that nobody waits for"
    for node in nodes:
        assert tree.size[node] > 0
        assert tree.depth[node] >= len(tree.path(node))
        assert tree.users[node] == users[node]
    assert users.keys() <= nodes.keys()
    assert not owners or max(owners.values()) == 1, "a page with two owners"
    held = {page for page, node in in_tree.items() if tree.users[node]}
    free = pool.free_pages.tolist()
    assert len(set(free)) == len(free)
    assert not set(free) & (set(owners) | set(in_tree))
    assert not set(owners) & set(in_tree)
    assert (pool.free, pool.in_use, pool.cached) == (len(free), len(owners) + len(held), len(in_tree) - len(held))
    assert pool.free + pool.in_use + pool.cached == pool.size
    assert state.policy.prefix_caching or not pool.cached
    waiting = list(state.queue.waiting)
    assert len(waiting) == len(state.queue.waiting)
    assert state.queue.waiting.tokens == sum(each.request.limit for each in waiting if not each.request.parked)
    assert state.queue.waiting.parked == sum(sample.request.parked for sample in waiting)
    assert all(sample.slot < 0 and not sample.finished for sample in waiting)
    assert slots.running == np.count_nonzero(slots.active)
    ours = [sample for sample in (*waiting, *slots.running_samples()) if sample.request.sink == SINK]  # no canary
    assert len(ours) == core.live(SINK)
    for request in state.queue.requests.values():
        if request.parked:
            running = [sample.slot for sample in request.samples if sample.slot >= 0]
            assert slots.parked[running].all()
            assert not slots.guaranteed[running].any()
            continue
        assert not request.guaranteed or not any(sample.preemptions for sample in request.samples)
        assert all(sample.preemptions <= 2 for sample in request.samples)


def check_all(driver: Driver) -> None:
    """Run to the end: every sample gets the tokens that it would have got alone, and nothing is left."""
    driver.run()
    for handle, seen in driver.seen.items():
        assert (seen.tokens, seen.finish.reason) == driver.expected(handle)
    while driver.answer():
        pass
    assert driver.core.state.pool.pages.in_use == 0
    assert not driver.core.state.pool.running_keys.numbers
