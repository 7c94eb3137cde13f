"""What the parts of the core share. One object for as long as one worker lives, and what outlives workers."""

from collections.abc import Sequence

import numpy as np

from services.scheduler.core.counters import STEP_SIZES, Counters
from services.scheduler.core.memory.pages import PagePool
from services.scheduler.core.memory.prefix_tree import PrefixTree
from services.scheduler.core.memory.slots import Slots
from services.scheduler.core.output import Outbox
from services.scheduler.core.policy import Policy
from services.scheduler.core.queue.lengths import LengthPredictor
from services.scheduler.core.queue.recent import RecentService
from services.scheduler.core.queue.running_keys import RunningKeys
from services.scheduler.core.queue.waiting import WaitingQueue
from services.scheduler.core.request import Priority, PromptShare, Request, Sample, WorkerShape
from services.scheduler.core.stopping.matcher import StopMatcher
from services.scheduler.core.stopping.tokens import StopTokens

_LOW_SHARE = 8  # one running sequence in so many
STEP_COST = 64.0  # until it is measured: CPUs are below it, GPUs above


class State:
    """``attach`` begins a new worker's life with an empty pool; queue, stop tables, lengths and counters stay."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, policy: Policy) -> None:
        self.policy = policy
        self.steps_ahead = policy.steps_ahead  # plans that may be in flight now
        self.waiting = WaitingQueue(int(policy.ageing_s * 1e9))
        self.requests: dict[str, Request] = {}  # unfinished ones, by id
        self.outbox = Outbox()
        self.counters = Counters()
        self.steps_by_tokens = [0] * STEP_SIZES  # entry i: steps of at most 2^i tokens, the last one all larger ones
        self.matcher = StopMatcher(token_bytes, vocab_size)
        self.stop_tokens = StopTokens(vocab_size)
        # Requests that something went wrong with, which are ended before anything else happens: what it was.
        self.broken: dict[Request, Exception] = {}
        self.failures: dict[str, Exception] = {}  # by id, of requests that ended so, for the log
        self.apart: list[Sample] | None = None  # on trial: nobody else runs now; owned by the quarantine
        self.recent = RecentService()
        self.attached = False
        self.step = 0  # of the last plan built
        self.step_cost = STEP_COST  # what a step costs beside its tokens, in tokens; measured by the shell
        self.first: list[Sample] = []  # waiting samples for which others made way: next in the order of service

    @property
    def low_share(self) -> int:
        """Running sequences of class ``low`` that may hold their own against higher classes."""
        return max(1, self.slots.running // _LOW_SHARE)

    def in_order(self, most: int) -> list[Sample]:
        """Return the next ``most`` waiting samples in the order of service.

        Samples of class ``low`` are overdue only while that class has less than its share of the running sequences:
        while its sequences run, it does not starve. During a trial only the samples on trial are returned.
        """
        if self.apart is not None:
            return [sample for sample in self.apart if sample.slot < 0 and not sample.finished][:most]
        running = self.slots.priority[self.slots.running_slots()]
        low = self.low_share - int(np.count_nonzero(running == Priority.LOW))
        order = self.waiting.candidates(most, max(low, 0))
        if not self.first:
            return order
        first = [sample for sample in self.first if sample in self.waiting]
        return [*first, *(sample for sample in order if sample not in first)][:most]

    @property
    def several_keys(self) -> bool:
        """Whether requests of more than one fairness key run or wait."""
        keys = self.running_keys
        return len(keys) > 1 or self.waiting.has_other_key(keys.only)

    def attach(self, shape: WorkerShape) -> None:
        """Begin with a worker that holds nothing."""
        if self.attached:
            self.pool.evict = lambda count: None  # it and its tree know each other: a circle would stay
        else:
            self.lengths = LengthPredictor(shape.max_context_tokens)
        self.shape = shape
        self.slots = Slots(shape)
        self.running_keys = RunningKeys()
        self.pool: PagePool = PagePool(shape.page_count, shape.page_size)
        self.tree = PrefixTree(self.pool, keep=self.policy.prefix_caching)
        self.step = 0
        self.prefilling: list[int] = []  # slots whose prompt is computed in part, in order; at most one of a key
        self.to_release: list[tuple[int, str]] = []  # (slot, request id): freed here, to be told to the worker
        self.preempted: list[str] = []  # request ids of those among them that wait again
        self.sharing: dict[Request, PromptShare] = {}  # requests with a share, in order
        self.membership = 0  # sequences that entered or left, ever
        self.attached = True
