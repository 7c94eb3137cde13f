"""State that the packages of the core share: the queue, which outlives workers, and the pool of one worker."""

from collections.abc import Sequence

import numpy as np

from services.common.plan.types import WorkerLimits
from services.scheduler.core.counters import STEP_SIZES, Counters
from services.scheduler.core.memory.pages import PagePool
from services.scheduler.core.memory.prefix_tree import PrefixTree
from services.scheduler.core.memory.slots import Slots
from services.scheduler.core.numbering import Numbering
from services.scheduler.core.output import Outbox
from services.scheduler.core.policy import Policy
from services.scheduler.core.queue.lengths import LengthPredictor
from services.scheduler.core.queue.recent import RecentService
from services.scheduler.core.queue.waiting import WaitingQueue
from services.scheduler.core.request import PauseMode, Priority, PromptShare, Request, Sample
from services.scheduler.core.stopping.matcher import StopMatcher
from services.scheduler.core.stopping.tokens import StopTokens

_LOW_SHARE = 8  # one in this number of running sequences is protected
STEP_COST = 64.0  # assumed until it is measured; CPUs are below it, GPUs above


class Queue:
    """Accepted requests, and what was learnt from them. Outlives workers."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, policy: Policy) -> None:
        self.waiting = WaitingQueue(int(policy.ageing_s * 1e9))
        self.first: list[Sample] = []  # waiting samples for which others were preempted; served next
        self.quarantined: list[Sample] | None = None  # if not None, only these run; set by ``Quarantine``
        self.pause: PauseMode | None = None  # None if the scheduler is not paused
        self.asleep = False  # the worker has no memory for weights or KV cache
        self.weights_version = ""  # of the worker; empty: those of its start
        self.requests: dict[str, Request] = {}  # unfinished requests, by id
        self.broken: dict[Request, Exception] = {}  # requests with an unexpected error, to be ended
        self.failures: dict[str, Exception] = {}  # errors by id of the request that they ended, for the log
        self.outbox = Outbox()
        self.matcher = StopMatcher(token_bytes, vocab_size)
        self.stop_tokens = StopTokens(vocab_size)
        self.lengths: LengthPredictor  # set when the first worker is attached
        self.recent = RecentService()
        self.counters = Counters()
        self.steps_by_tokens = [0] * STEP_SIZES  # entry i: steps of at most 2^i tokens; last entry: all larger steps
        self.steps_ahead = policy.steps_ahead  # limit of plans in flight
        self.step_cost = STEP_COST  # fixed cost of a step, in tokens; measured by the step loop

    def fail(self, request: Request, error: Exception) -> None:
        """End ``request`` before the next plan because of an unexpected ``error``. The first error counts."""
        self.broken.setdefault(request, error)


class Pool:
    """Slots and pages of one worker, as of the last plan that was built. Empty when the worker connects."""

    def __init__(self, shape: WorkerLimits, *, prefix_caching: bool) -> None:
        self.shape = shape
        self.slots = Slots(shape)
        self.running_keys: Numbering[str] = Numbering()  # fairness keys of running sequences
        self.pages = PagePool(shape.page_count, shape.page_size)
        self.tree = PrefixTree(self.pages, keep=prefix_caching)
        self.step = 0  # number of the last plan that was built
        self.prefilling: list[int] = []  # slots with a partly computed prompt, in order; at most one of each key
        self.to_release: list[tuple[int, str]] = []  # (slot, request id): to be released by the next plan
        self.preempted: list[str] = []  # request ids of the sequences in ``to_release`` that were preempted
        self.sharing: dict[Request, PromptShare] = {}  # in order of creation
        self.membership = 0  # number of admissions and releases so far

    def tokens_to_prefill(self) -> int:
        """Return the number of tokens that the partly computed prompts still need."""
        begun = self.prefilling
        return int((self.slots.given[begun] - self.slots.scheduled[begun]).sum()) if begun else 0

    def holds_longest(self) -> bool:
        """Return whether the pages suffice if every running sequence reaches its limit."""
        running = self.slots.running_slots()
        longest = -(-(self.slots.limit[running] - 1) // self.pages.page_size)
        missing = np.maximum(longest - self.slots.page_count[running], 0)
        if self.shape.window_tokens:
            # Other sequences may hold a page of the tree that one leaves behind, so only own pages make room.
            first = np.maximum(self.slots.left_behind[running], self.tree.depth[self.slots.node[running]])
            own = self.slots.page_count[running] - first
            within = np.minimum(missing, np.maximum(self.shape.window_pages - own, 0))
            missing = np.where(self.slots.lent_pages[running] > 0, missing, within)
        return self.pages.in_use + int(missing.sum()) <= self.pages.size

    def close(self) -> None:
        """Break the reference cycle between pages and tree, so that their memory is freed immediately."""
        self.pages.evict = lambda count: None


class State:
    """The queue, and the pool of the last worker."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, policy: Policy) -> None:
        self.policy = policy
        self.queue = Queue(token_bytes, vocab_size, policy)
        self.pool: Pool  # set when the first worker is attached; empty after the worker is lost
        self.attached = False  # True from the first worker on

    @property
    def low_share(self) -> int:
        """The number of running sequences of class ``low`` that are protected from preemption for higher classes."""
        return max(1, self.pool.slots.running // _LOW_SHARE)

    @property
    def several_keys(self) -> bool:
        """True if requests of more than one fairness key run or wait."""
        keys = self.pool.running_keys
        return len(keys.numbers) > 1 or self.queue.waiting.has_other_key(keys.only)

    def in_order(self, most: int) -> list[Sample]:
        """Return the next ``most`` waiting samples in the order of service.

        Samples of class ``low`` can be overdue only while that class has less than its share of the running sequences,
        as otherwise it does not starve. If samples are quarantined, only these are returned.
        """
        queue, slots = self.queue, self.pool.slots
        if queue.quarantined is not None:
            return [sample for sample in queue.quarantined if sample.slot < 0 and not sample.finished][:most]
        low = self.low_share - int(np.count_nonzero(slots.priority[slots.running_slots()] == Priority.LOW))
        order = queue.waiting.candidates(most, max(low, 0))
        if not queue.first:
            return order
        first = [sample for sample in queue.first if sample in queue.waiting]
        return [*first, *(sample for sample in order if sample not in first)][:most]

    def attach(self, shape: WorkerLimits) -> None:
        """Replace the pool by an empty one for a new worker."""
        if self.attached:
            self.pool.close()
        else:
            self.queue.lengths = LengthPredictor(shape.max_context_tokens)
        self.pool = Pool(shape, prefix_caching=self.policy.prefix_caching)
        self.attached = True
