"""What the parts of the core share: the queue, which outlives workers, and the pool of one worker."""

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

_LOW_SHARE = 8  # one in 8 running sequences
STEP_COST = 64.0  # until it is measured: CPUs are below it, GPUs above


class Queue:
    """Accepted requests, and what is known of them and of the service so far. Outlives workers."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, policy: Policy) -> None:
        self.waiting = WaitingQueue(int(policy.ageing_s * 1e9))
        self.first: list[Sample] = []  # waiting samples that others were preempted for: next in the order of service
        self.on_trial: list[Sample] | None = None  # on trial: no other sample runs now; owned by the quarantine
        self.requests: dict[str, Request] = {}  # unfinished ones, by id
        self.broken: dict[Request, Exception] = {}  # requests in which an error occurred; ended before the next plan
        self.failures: dict[str, Exception] = {}  # errors by id of the ended request, for the log
        self.outbox = Outbox()
        self.matcher = StopMatcher(token_bytes, vocab_size)
        self.stop_tokens = StopTokens(vocab_size)
        self.lengths: LengthPredictor  # from the first worker on
        self.recent = RecentService()
        self.counters = Counters()
        self.steps_by_tokens = [0] * STEP_SIZES  # entry i: steps of at most 2^i tokens, the last one all larger ones
        self.steps_ahead = policy.steps_ahead  # plans that may be in flight now
        self.step_cost = STEP_COST  # fixed cost of a step, in tokens; measured by the shell


class Pool:
    """Slots and pages of one worker, and what its plans did to them. Empty when the worker connects."""

    def __init__(self, shape: WorkerShape, *, prefix_caching: bool) -> None:
        self.shape = shape
        self.slots = Slots(shape)
        self.running_keys = RunningKeys()
        self.pages = PagePool(shape.page_count, shape.page_size)
        self.tree = PrefixTree(self.pages, keep=prefix_caching)
        self.step = 0  # of the last plan built
        self.prefilling: list[int] = []  # slots whose prompt is computed in part, in order; at most one of a key
        self.to_release: list[tuple[int, str]] = []  # (slot, request id): free here, not yet released on the worker
        self.preempted: list[str] = []  # request ids of those in ``to_release`` that wait again
        self.sharing: dict[Request, PromptShare] = {}  # requests with a share, in order
        self.membership = 0  # sequences that were admitted or left, in total

    def close(self) -> None:
        """Break the reference cycle of pages and tree, so that their memory is freed at once."""
        self.pages.evict = lambda count: None


class State:
    """The queue, and the pool of the worker that is or was attached last."""

    def __init__(self, token_bytes: Sequence[bytes], vocab_size: int, policy: Policy) -> None:
        self.policy = policy
        self.queue = Queue(token_bytes, vocab_size, policy)
        self.pool: Pool  # empty once its worker is lost; there is none before the first worker
        self.attached = False  # whether there was a worker

    @property
    def low_share(self) -> int:
        """The number of running sequences of class ``low`` that need not make way for higher classes."""
        return max(1, self.pool.slots.running // _LOW_SHARE)

    @property
    def several_keys(self) -> bool:
        """Whether requests of more than one fairness key run or wait."""
        keys = self.pool.running_keys
        return len(keys) > 1 or self.queue.waiting.has_other_key(keys.only)

    def in_order(self, most: int) -> list[Sample]:
        """Return the next ``most`` waiting samples in the order of service.

        Samples of class ``low`` are overdue only while that class has less than its share of the running sequences:
        while its sequences run, it does not starve. During a trial only the samples on trial are returned.
        """
        queue, slots = self.queue, self.pool.slots
        if queue.on_trial is not None:
            return [sample for sample in queue.on_trial if sample.slot < 0 and not sample.finished][:most]
        low = self.low_share - int(np.count_nonzero(slots.priority[slots.running_slots()] == Priority.LOW))
        order = queue.waiting.candidates(most, max(low, 0))
        if not queue.first:
            return order
        first = [sample for sample in queue.first if sample in queue.waiting]
        return [*first, *(sample for sample in order if sample not in first)][:most]

    def attach(self, shape: WorkerShape) -> None:
        """Begin with a worker that holds nothing."""
        if self.attached:
            self.pool.close()
        else:
            self.queue.lengths = LengthPredictor(shape.max_context_tokens)
        self.pool = Pool(shape, prefix_caching=self.policy.prefix_caching)
        self.attached = True
