"""Counts of what the core has done since the scheduler started."""

from dataclasses import dataclass

STEP_SIZES = 19  # steps are counted by their tokens: at most 1, 2, 4, ..., 2^17, and more


@dataclass
class Counters:
    """Counters of the core and of the step loop, named as in the contract. Owned by the core."""

    steps: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generated_tokens: int = 0
    wasted_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    requests_accepted: int = 0
    requests_rejected: int = 0
    sequences_finished: int = 0
    sequences_cancelled: int = 0
    worker_restarts: int = 0
    postponed_plans: int = 0
    overtakes: int = 0
    hydragen_rows: int = 0
    batch_rows: int = 0
    device_busy_ns: int = 0
    device_idle_ns: int = 0
    yields: int = 0
    wasted_steps: int = 0
    loop_wait_ns: int = 0  # the step loop writes the loop_ counters
    loop_take_ns: int = 0
    loop_plan_ns: int = 0
    loop_send_ns: int = 0
    loop_report_ns: int = 0
    loop_deliver_ns: int = 0
    looked_up_prompt_tokens: int = 0
    step_tokens: int = 0
    tail_rows: int = 0
    tail_steps: int = 0
    device_late_ns: int = 0
