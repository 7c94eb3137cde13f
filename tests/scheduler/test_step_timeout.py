"""The timeout of a worker that returns no results."""

from services.scheduler.engine.step_timeout import StepTimeout


def test_a_worker_is_silent_from_the_last_answer_on_however_long_its_queue():
    timeout, now = StepTimeout(3.0), 100.0
    for _ in range(20):
        timeout.restart(now)  # an answer
        for _ in range(2):
            now += 1.0
            assert not timeout.check(now)


def test_the_deadline_is_kept_to_the_moment():
    timeout, now, looks = StepTimeout(3.5), 100.0, 0
    timeout.restart(now)
    while True:
        now += timeout.until_check()
        looks += 1
        if timeout.check(now):
            break
    assert (now, looks) == (103.5, 4)


def test_a_scheduler_that_was_stopped_itself_does_not_blame_its_worker():
    timeout = StepTimeout(30.0)
    timeout.restart(100.0)
    assert not timeout.check(1000.0)
    assert timeout.seconds == 2.0
