"""How long a worker has been silent."""

from services.scheduler.engine.silence import Silence


def test_a_worker_is_silent_from_the_last_answer_on_however_long_its_queue():
    silence, now = Silence(3.0), 100.0
    for _ in range(20):
        silence.begin(now)  # an answer
        for _ in range(2):
            now += 1.0
            assert not silence.look(now)


def test_the_deadline_is_kept_to_the_moment():
    silence, now, looks = Silence(3.5), 100.0, 0
    silence.begin(now)
    while True:
        now += silence.until_look()
        looks += 1
        if silence.look(now):
            break
    assert (now, looks) == (103.5, 4)


def test_a_scheduler_that_was_stopped_itself_does_not_blame_its_worker():
    silence = Silence(30.0)
    silence.begin(100.0)
    assert not silence.look(1000.0)
    assert silence.seconds == 2.0
