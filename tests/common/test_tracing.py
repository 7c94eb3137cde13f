"""What tracing costs where it is off, who decides about a trace, and a collector that is not there."""

import subprocess
import sys
import time

import pytest

from bench.server import free_port
from services.common.config import GatewayConfig
from services.common.flags import FlagError, build
from services.common.process.tracing import Tracing, traceparent_of

NOTHING_LOADED = """
import sys
import services.gateway.app.app, services.scheduler.server
from services.common.config import GatewayConfig
from services.common.process.tracing import Tracing
assert Tracing.of(GatewayConfig(), "test") is None
print([name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))])
"""
ID, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def tracing(monkeypatch):
    """Of a collector that is not there."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    made = Tracing.of(build(GatewayConfig, {"trace_sample_ratio": 0.0}), "test")
    yield made
    made.close()


def test_without_an_endpoint_nothing_of_it_is_loaded():
    ran = subprocess.run([sys.executable, "-c", NOTHING_LOADED], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_caller_decides_whether_its_trace_is_recorded(tracing):
    traced, untraced, own = (
        tracing.start("test", parent) for parent in (f"00-{ID}-{PARENT}-01", f"00-{ID}-{PARENT}-00", "")
    )
    assert [span.is_recording() for span in (traced, untraced, own)] == [True, False, False]
    assert traceparent_of(traced).startswith(f"00-{ID}-")
    assert traceparent_of(traced).endswith("-01")
    assert traceparent_of(untraced).endswith("-00")
    traced.end()  # nobody takes it


def test_clients_that_have_everything_recorded_do_not_for_long(tracing):
    began_at = time.monotonic()
    told = [tracing.of_client(f"00-{number:032x}-{PARENT}-01") for number in range(1, 1001)]
    recorded = [tracing.start("test", each).is_recording() for each in told]
    assert all(recorded[:50])
    assert sum(recorded) <= 50 * (2 + time.monotonic() - began_at)
    assert {each.rpartition("-")[0] for each in told} == {f"00-{number:032x}-{PARENT}" for number in range(1, 1001)}


def test_the_bound_of_clients_is_none_of_the_share_that_is_recorded_anyhow(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    tracing = Tracing.of(GatewayConfig(), "test")
    told = [f"00-{number:032x}-{PARENT}-{flags}" for number in range(1, 200) for flags in ("00", "01")]
    assert [tracing.of_client(each) for each in (*told, "", "nonsense")] == [*told, "", "nonsense"]
    tracing.close()


@pytest.mark.parametrize("malformed", ["00-zz-zz-00", f"00-{'0' * 32}-{PARENT}-01", "x" * 10_000, f"00-{ID}"])
def test_what_is_no_trace_context_begins_a_trace_of_its_own(tracing, malformed):
    assert ID not in traceparent_of(tracing.start("test", malformed))


def test_flags_that_mean_nothing_are_refused(monkeypatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(FlagError, match=r"trace_sample_ratio=0\.5: has no effect without otlp_endpoint"):
        build(GatewayConfig, {"trace_sample_ratio": 0.5})
    with pytest.raises(FlagError, match="otlp_endpoint='collector:4317'"):
        build(GatewayConfig, {"otlp_endpoint": "collector:4317"})
