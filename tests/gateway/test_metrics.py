"""Our own histogram, as Prometheus reads it."""

from services.gateway.metrics import Histogram


def test_a_histogram_is_cumulative_and_weighs_observations():
    histogram = Histogram("toka_test", "A test", bounds=(1.0, 2.0))
    histogram.observe(0.5, times=3)
    histogram.observe(1.0)
    histogram.observe(1.5, times=2)
    histogram.observe(9.0)
    samples = {(sample.name, sample.labels.get("le")): sample.value for sample in histogram.family().samples}
    assert samples[("toka_test_bucket", "1.0")] == 4
    assert samples[("toka_test_bucket", "2.0")] == 6
    assert samples[("toka_test_bucket", "+Inf")] == samples[("toka_test_count", None)] == 7
    assert samples[("toka_test_sum", None)] == 0.5 * 3 + 1.0 + 1.5 * 2 + 9.0
