"""The loop's sense of time, with a clock made up here."""

from random import Random

import pytest

from services.common.plan.result import Timing
from services.scheduler.engine.pace import Pace
from services.scheduler.engine.step_times import StepTimes


class Loop:
    """A scheduler and a worker of given speeds; ``steps_ahead`` plans in flight. A full plan's step takes
    ``full_step_s`` where it is not ``step_s``."""

    def __init__(
        self, step_s: float, full_s: float, light_s: float, steps_ahead: int = 2, full_step_s: float = 0.0
    ) -> None:
        self.pace, self.now = Pace(), 100.0
        self.step_s, self.full_s, self.light_s, self.steps_ahead = step_s, full_s, light_s, steps_ahead
        self.full_step_s = full_step_s
        self.worker_free = self.now  # when it is through with what it holds
        self.due: list[float] = []
        self.hurried = self.in_a_row = 0
        self.idle_s = 0.0

    def turn(self) -> None:
        """Fill the worker's queue, then wait for its next answer."""
        while len(self.due) < self.steps_ahead:
            hurry = self.pace.is_starving(self.now, self.steps_ahead) and self.in_a_row < 3
            self.in_a_row = self.in_a_row + 1 if hurry else 0
            self.hurried += hurry
            took = self.light_s if hurry else self.full_s
            self.now += took
            self.pace.sent(self.now, took, full=not hurry)
            self.idle_s += max(0.0, self.now - self.worker_free)
            step_s = self.step_s if hurry else self.full_step_s or self.step_s
            self.worker_free = max(self.worker_free, self.now) + step_s
            self.due.append(self.worker_free)
        answered = self.due.pop(0)
        self.now = max(self.now, answered)
        self.pace.result_received(answered)

    def run(self, turns: int) -> "Loop":
        for _ in range(turns):
            self.turn()
        return self


@pytest.mark.parametrize("steps_ahead", [1, 2, 4])
@pytest.mark.parametrize("plan_s", [0.001, 0.015, 0.05])
def test_the_time_of_a_step_is_the_worker_s_own_however_slow_the_scheduler_is(steps_ahead, plan_s):
    loop = Loop(0.02, plan_s, plan_s, steps_ahead).run(60)
    assert loop.pace.step_s == pytest.approx(0.02)


def test_one_slow_first_step_is_forgotten():
    loop = Loop(1.0, 0.001, 0.001).run(1)
    loop.step_s = 0.02
    assert loop.run(40).pace.step_s == pytest.approx(0.02, rel=0.05)


def test_a_worker_that_has_time_is_never_hurried_for():
    assert Loop(0.02, 0.005, 0.001).run(200).hurried == 0


def test_a_worker_that_would_run_dry_gets_light_plans_first():
    hurried = Loop(0.01, 0.025, 0.002).run(200)
    assert hurried.hurried > 100
    patient = Loop(0.01, 0.025, 0.002)
    patient.pace.is_starving = lambda now, most: False
    assert hurried.idle_s < 0.5 * patient.run(200).idle_s


def test_prompts_that_keep_the_worker_are_not_put_off_for_steps_that_do_not():
    loop = Loop(0.006, 0.02, 0.002, full_step_s=0.065)
    loop.pace.sent(loop.now - 0.1, 0.3, full=True)  # the first plan took far too long
    loop.pace.result_received(loop.now - 0.035)
    loop.run(50)
    before, idle_s = loop.hurried, loop.idle_s
    loop.run(100)
    assert (loop.hurried, loop.idle_s) == (before, idle_s)


def test_one_slow_first_plan_does_not_make_the_loop_hurry_for_ever():
    loop = Loop(0.02, 0.3, 0.001).run(1)
    loop.full_s = 0.005
    loop.run(200)
    before = loop.hurried
    assert loop.run(100).hurried == before


def test_where_a_light_plan_is_no_faster_nothing_is_postponed():
    loop = Loop(0.001, 0.01, 0.008)
    loop.pace.sent(loop.now, 0.008, full=False)
    loop.pace.result_received(loop.now + 0.001)
    assert loop.run(100).hurried == 0


def test_with_one_plan_in_flight_the_worker_waits_by_choice():
    assert Loop(0.01, 0.025, 0.001, steps_ahead=1).run(50).hurried == 0


def test_another_worker_s_answers_are_not_awaited():
    loop = Loop(0.02, 0.001, 0.001).run(5)
    loop.pace.begin()
    loop.due.clear()
    loop.now += 50
    loop.worker_free = loop.now
    assert loop.run(30).pace.step_s == pytest.approx(0.02)


@pytest.mark.parametrize(("step_ms", "plans"), [(35, 2), (2.5, 2), (0.9, 5), (0.5, 8), (0.1, 16)])
def test_short_steps_get_more_plans(step_ms, plans):
    loop = Loop(step_ms / 1000, 0.0001, 0.0001).run(60)
    assert loop.pace.plans_ahead(2, 2, 16) == plans


def test_before_the_first_step_and_within_bounds_nothing_changes():
    pace = Loop(0.0009, 0.0001, 0.0001).pace
    assert pace.plans_ahead(3, 2, 16) == 3
    pace.step_s = 0.0009
    assert pace.plans_ahead(6, 2, 16) == 6  # one less is no reason
    assert pace.plans_ahead(7, 2, 16) == 5
    assert pace.plans_ahead(2, 2, 4) == 4
    pace.step_s = 0.035
    assert pace.plans_ahead(3, 2, 16) == 2


class Pipeline:
    """A scheduler and workers in ``stages`` that are equally fast; a step is cut into ``parts``. An answer, or a plan,
    takes ``link_s``."""

    def __init__(self, step_s: float, link_s: float, stages: int, parts: int) -> None:
        self.pace = Pace()
        self.lead = (stages - 1) / parts
        self.pace.begin(self.lead)
        self.step_s, self.link_s = step_s, link_s
        self.now, self.ahead = 100.0, 2
        self.first_free = self.now  # when the first stage is through with what it holds
        self.due: list[float] = []
        self.idle_s = 0.0  # of the first stage

    def run(self, turns: int, extra: int = 0) -> "Pipeline":
        """``extra``: plans in flight beyond those that the pace wants."""
        for _ in range(turns):
            self.ahead = self.pace.plans_ahead(self.ahead, 2, 16)
            while len(self.due) < self.ahead + extra:
                self.pace.sent(self.now, 0.0, full=True)
                arrived = self.now + self.link_s
                self.idle_s += max(0.0, arrived - self.first_free)
                self.first_free = max(self.first_free, arrived) + self.step_s
                self.due.append(self.first_free + self.lead * self.step_s + self.link_s)
            self.now = self.due.pop(0)
            self.pace.result_received(self.now)
        return self


@pytest.mark.parametrize(("stages", "parts"), [(1, 1), (2, 2), (2, 3), (3, 4), (4, 5), (8, 9), (2, 10)])
@pytest.mark.parametrize("step_ms", [2.1, 4.1, 20])
def test_the_first_of_several_stages_finds_a_plan_as_early_as_a_worker_alone(stages, parts, step_ms):
    pipeline = Pipeline(step_ms / 1000, 0.001, stages, parts).run(60)
    before = pipeline.idle_s
    assert pipeline.run(60).idle_s == pytest.approx(before, abs=1e-6)


@pytest.mark.parametrize(("stages", "parts"), [(2, 2), (4, 5), (8, 9)])
def test_as_many_plans_as_for_a_worker_alone_would_leave_the_first_stage_waiting(stages, parts):
    pipeline = Pipeline(0.0041, 0.0015, stages, parts).run(60, extra=-1)
    before = pipeline.idle_s
    assert pipeline.run(60, extra=-1).idle_s > before + 60 * 0.0003


@pytest.mark.parametrize(("step_ms", "plans"), [(35, 3), (4, 3), (2.5, 3), (0.9, 6), (0.1, 16)])
def test_several_stages_get_one_plan_more(step_ms, plans):
    assert Pipeline(step_ms / 1000, 0.0001, 4, 5).run(60).ahead == plans


def test_the_first_stage_runs_dry_before_the_last_does():
    paces = [Pace(), Pace()]
    paces[1].begin(0.6)
    for pace in paces:
        for second in range(3):
            pace.sent(second, 0.7, full=True)
            pace.result_received(second + 0.5)
        pace.sent(9.0, 0.1, full=False)
        pace.result_received(9.5)
        pace.sent(10.0, 0.7, full=True)
        pace.sent(10.0, 0.7, full=True)
    assert [pace.is_starving(10.1, 3) for pace in paces] == [False, True]


class Device:
    """A worker that measures its steps, each of ``tokens`` tokens. Results and plans take ``link_s`` each.

    The device begins a step as soon as its host does, and the host launches it for ``prepare_s``.
    """

    def __init__(self, link_s: float, prepare_s: float = 0.0, least: int = 2) -> None:
        self.pace, self.now, self.link_s, self.prepare_s, self.least = Pace(), 100.0, link_s, prepare_s, least
        self.free_at = self.host_free_at = self.now
        self.due: list[tuple[float, Timing]] = []
        self.ahead = 2
        self.limits = 0  # changes of the limit of plans in flight
        self.idle_s = self.queued_s = 0.0

    def run(self, steps: list[float]) -> "Device":
        """Run steps of these seconds. A step has a token for each microsecond."""
        together = 0  # plans that are sent with the last one
        for step_s in steps:
            if not together:
                self._wait_until_needed()
                together = min(self.pace.together, self.ahead - len(self.due))
            together -= 1
            self.pace.sent(self.now, 0.0001, full=True, tokens=round(step_s * 1e6))
            arrived = self.now + self.link_s
            started = max(arrived, self.host_free_at)
            idle_s, queued_s = max(0.0, started - self.free_at), max(0.0, self.free_at - arrived)
            self.idle_s, self.queued_s = self.idle_s + idle_s, self.queued_s + queued_s
            self.host_free_at = started + self.prepare_s
            began = max(started, self.free_at)
            self.free_at = max(began + step_s, self.host_free_at)
            nanoseconds = (round(each * 1e9) for each in (self.prepare_s, self.free_at - began, idle_s))
            prepare, device, idle = nanoseconds
            timing = Timing(prepare=prepare, device=device, idle=idle, queued=round((started - arrived) * 1e9))
            self.due.append((self.free_at + self.link_s, timing))
        return self

    def _wait_until_needed(self) -> None:
        while True:
            before, self.ahead = self.ahead, self.pace.plans_ahead(self.ahead, self.least, 16)
            self.limits += self.ahead != before
            later_s = self.pace.until_needed(self.now, hold_long=False)
            if len(self.due) < self.ahead and (not self.due or self.now + later_s < self.due[0][0]):
                self.now += later_s
                return
            self.now, timing = self.due.pop(0)
            self.pace.result_received(self.now, timing)


DECODES, MIXED = [0.0009] * 400, [0.0009, 0.0009, 0.004] * 400


@pytest.mark.parametrize("steps", [DECODES, MIXED, [0.006] * 400], ids=["decodes", "mixed", "long"])
@pytest.mark.parametrize("link_s", [0.0003, 0.001, 0.0025])
def test_plans_arrive_just_before_they_are_needed(steps, link_s):
    """A request that arrives meanwhile gets into a plan that is sent late."""
    device = Device(link_s).run(steps * 3)
    device.idle_s = device.queued_s = 0.0
    device.run(steps)
    assert device.idle_s < 0.03 * sum(steps)
    assert device.queued_s / len(steps) < 2 * link_s + 0.002


@pytest.mark.parametrize("link_s", [0.0003, 0.001, 0.0025])
def test_plans_arrive_in_time_if_the_times_of_steps_are_hard_to_predict(link_s):
    random = Random(1)
    steps = [step_s * random.choice((0.6, 1.4)) for step_s in MIXED]
    device = Device(link_s).run(steps * 2)
    device.idle_s = 0.0
    device.run(steps)
    assert device.idle_s < 0.05 * sum(steps)


@pytest.mark.parametrize("link_s", [0.0003, 0.001, 0.0025])
def test_prompts_among_short_steps_hardly_change_the_limit_of_plans(link_s):
    """A core with few free pages refuses to raise the limit again."""
    device = Device(link_s).run(MIXED * 2)
    device.limits = 0
    assert device.run(MIXED).limits <= 20


@pytest.mark.parametrize("link_s", [0.0003, 0.001, 0.0025])
@pytest.mark.parametrize(("step_s", "prepare_s"), [(0.012, 0.004), (0.008, 0.006), (0.006, 0.006)])
def test_plans_arrive_in_time_if_the_host_launches_a_step_for_long(step_s, prepare_s, link_s):
    """The host still launches a step that the device already runs, so that time does not excuse a late plan."""
    device = Device(link_s, prepare_s).run([step_s] * 1500)
    device.idle_s = 0.0
    device.run([step_s] * 400)
    assert device.idle_s < 0.03 * 400 * step_s


@pytest.mark.parametrize(("step_s", "link_s", "least"), [(0.01, 0.012, 4), (0.015, 0.006, 2), (0.002, 0.012, 14)])
def test_more_plans_hide_a_slow_link(step_s, link_s, least):
    device = Device(link_s, least=least).run([step_s] * 1500)
    device.idle_s = 0.0
    device.run([step_s] * 400)
    assert device.idle_s < 0.03 * 400 * step_s


def test_the_time_of_a_step_includes_the_host_s_if_plans_wait_for_the_host():
    pace = Pace()
    timing = Timing(prepare=3_000_000, device=1_000_000, idle=2_000_000, queued=5_000_000)
    for step in range(20):
        pace.sent(100.0 + 0.003 * (step - 2), 0.0001, full=True, tokens=8)
        pace.result_received(100.0 + 0.003 * step, timing)
    assert pace.step_s == pytest.approx(0.003)
    late = Timing(prepare=3_000_000, device=1_000_000, idle=2_000_000)
    for step in range(20, 80):
        pace.sent(100.0 + 0.003 * (step - 2), 0.0001, full=True, tokens=8)
        pace.result_received(100.0 + 0.003 * step, late)
    assert pace.step_s == pytest.approx(0.001, rel=0.01)


def test_the_expected_time_of_a_step_has_a_fixed_part():
    times = StepTimes()
    for tokens in (8, 600, 1000):  # 1 ms, and 3 us for each token
        times.note(tokens, 0.001 + 3e-6 * tokens)
    assert times.expected_s(520) == pytest.approx(0.001 + 3e-6 * 520, rel=0.05)
    assert times.expected_s(16) is None
    one_size = StepTimes()  # the fixed part is unknown
    one_size.note(600, 0.0028)
    assert one_size.expected_s(520) == pytest.approx(0.0028 * 520 / 600)
    assert one_size.expected_s(1000) == pytest.approx(0.0028)


def test_more_distant_workers_get_plans_earlier():
    queued = [Device(link_s).run(DECODES * 4).pace.plans_ahead(2, 2, 16) for link_s in (0.0003, 0.001, 0.0025)]
    assert queued == sorted(queued)
    assert queued[0] < queued[-1]


def test_more_distant_workers_get_more_plans_together():
    together = [Device(link_s).run(DECODES * 4).pace.together for link_s in (0.0001, 0.001, 0.0025, 0.01)]
    assert together == sorted(together)
    assert (together[0], together[-1]) == (1, 4)
    assert Device(0.0025).run([0.006] * 1600).pace.together == 1


def test_an_idle_worker_s_plan_is_late_if_there_was_work():
    margins = {}
    for follows in (False, True):
        pace = Pace()
        for step in range(20):  # each plan is sent after the result of the one before
            pace.sent(100.0 + step, 0.0001, full=True, tokens=8, follows=follows)
            pace.result_received(100.5 + step, Timing(device=1_000_000, idle=2_000_000))
        pace.sent(200.0, 0.0001, full=True, tokens=8)
        pace.sent(200.0, 0.0001, full=True, tokens=800)
        pace.times.note(800, 0.05)
        margins[follows] = 0.051 - pace.until_needed(200.0, hold_long=True)
    assert margins[True] > 1.5 * margins[False]


def test_plans_of_a_worker_that_does_not_measure_are_sent_at_once_and_alone():
    loop = Loop(0.01, 0.0001, 0.0001).run(40)
    assert loop.pace.until_needed(loop.now, hold_long=False) == 0.0
    assert loop.pace.together == 1
