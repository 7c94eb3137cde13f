"""Who may call what on a scheduler: keys, the gateways' token, certificates. Who may not leaves no trace."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from structlog.testing import capture_logs

from services.common.config import SchedulerConfig
from services.common.errors import InvalidRequest
from services.common.host import file_watch
from services.common.keys import hash_of, new_key
from services.common.rpc.channel import PLAIN, Dialer
from services.common.rpc.token import TokenFile, make_token_file
from services.scheduler.api.access import exposure
from services.scheduler.server import SchedulerServer
from tests.common.rpc.authority import Authority, flags, links
from tests.fakes.worker import FakeWorker
from tests.scheduler import every_method
from tests.scheduler.call_status import begins, ends
from tests.scheduler.every_method import METHODS, OF_ADMINS, request
from tokasaurus.scheduler.v1 import generate_pb2, observe_pb2, scheduler_pb2, scheduler_pb2_grpc

OK, WHO, NO = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
KEYS = {name: new_key() for name in ("team", "other", "boss", "late", "one-at-a-time", "thrifty", "open")}
ENTRIES = {
    "team": "",
    "other": 'scopes = ["inference"]',
    "boss": 'scopes = ["admin"]',
    "late": "expires = 2020-01-01",
    "one-at-a-time": "max_concurrent = 1",
    "thrifty": "tokens_per_minute = 1000",
    "open": "tokens_per_minute = 1100",
}


def write_keys(path: Path) -> Path:
    entry = '[[keys]]\nname = "{}"\nhash = "{}"\n{}\n'
    path.write_text("\n".join(entry.format(name, hash_of(key), ENTRIES[name]) for name, key in KEYS.items()))
    return path


@pytest.fixture
def keys(tmp_path) -> Path:
    return write_keys(tmp_path / "keys.toml")


@pytest.fixture
def token(tmp_path) -> Path:
    make_token_file(tmp_path / "token")
    return tmp_path / "token"


def shown(secret: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {secret}"),)


@dataclass
class Service:
    """A scheduler, its fake worker, and how to ask it."""

    worker: FakeWorker
    server: SchedulerServer
    channel: grpc.aio.Channel

    @property
    def stub(self) -> scheduler_pb2_grpc.SchedulerServiceStub:
        return scheduler_pb2_grpc.SchedulerServiceStub(self.channel)

    def calls(self, metadata=()) -> dict[str, grpc.aio.Call]:
        """Return a call of every method."""
        return every_method.calls(self.channel, metadata)

    async def codes(self, metadata=(), *, trusted) -> dict[str, grpc.StatusCode]:
        """How a call of each method ends. ``trusted``: metadata of somebody who has something planned meanwhile."""
        calls = self.calls(metadata)
        watching = asyncio.create_task(begins(calls.pop("WatchPlans")))
        codes = {name: await ends(call) for name, call in calls.items()}
        while not watching.done():
            assert await ends(self.stub.Generate(request(), metadata=trusted)) is OK
        return codes | {"WatchPlans": await watching}

    async def refusals(self, metadata) -> dict[str, grpc.StatusCode]:
        """Return how a refused call of each method ends.

        A call whose first message is written after the server has refused it ends as INTERNAL in grpc.aio, by the
        client's own failed write, so it is made again. An INTERNAL of the server would be in its log.
        """
        for _ in range(10):
            codes = {name: await ends(call) for name, call in self.calls(metadata).items()}
            if grpc.StatusCode.INTERNAL not in codes.values():
                break
        return codes

    async def load(self, metadata=()) -> observe_pb2.Load:
        return (await self.stub.GetLoad(observe_pb2.GetLoadRequest(), metadata=metadata)).load


@asynccontextmanager
async def serving(dialer: Dialer = PLAIN, *, worker_listen: str = "127.0.0.1:0", **given):
    """All servers. Ready means that the link to the worker is up."""
    worker = FakeWorker()
    at = await worker.start(worker_listen)
    config = SchedulerConfig(worker_addresses=(at,), scheduler_listen="127.0.0.1:0", **given)
    server = SchedulerServer(config)
    address = await server.start()
    try:
        async with dialer.open_aio(address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())  # for everybody
            while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            watch.cancel()
            yield Service(worker, server, channel)
    finally:
        await server.stop()
        await worker.stop()


LET_IN = dict.fromkeys(METHODS, OK) | every_method.CODES


def test_every_method_is_tested():
    service = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"]
    assert {method.name for method in service.methods} == METHODS - {"reflection"}


async def test_without_keys_everything_is_open():
    async with serving() as service:
        assert await service.codes(trusted=()) == LET_IN
        assert await service.codes(shown("whatever"), trusted=()) == LET_IN


@pytest.mark.parametrize("with_token", [False, True])
async def test_who_shows_no_key_or_a_wrong_one_touches_nothing(keys, token, with_token):
    given = {"grpc_token_file": str(token)} if with_token else {}
    async with serving(api_keys_file=str(keys), **given) as service:
        service.worker.record = True
        secret = token.read_text().strip()
        refused = [
            (), shown("tk-unknown"), shown(KEYS["late"]), shown(""), shown(KEYS["team"] + "x"),
            shown(KEYS["team"][:-1]), shown(hash_of(KEYS["team"])), (("authorization", KEYS["team"]),),
            (("authorization", "Basic dGVhbTo="),), (("api-key", KEYS["team"]),), shown(KEYS["team"]) * 2,
            shown(secret[:-1]), *([] if with_token else [shown(secret)]),
        ]  # fmt: skip
        with capture_logs() as logs:
            for metadata in refused:
                assert await service.refusals(metadata) == dict.fromkeys(METHODS, WHO), metadata
        assert logs == []  # no session either
        load = await service.load(shown(KEYS["team"]))
        assert (load.counters.requests_accepted, load.counters.steps, load.waiting_sequences) == (0, 0, 0)
        assert service.worker.plans == []


async def test_a_key_opens_what_its_scopes_say(keys, token):
    async with serving(api_keys_file=str(keys), grpc_token_file=str(token)) as service:
        trusted = shown(token.read_text().strip())
        for name in ("team", "other"):
            codes = await service.codes(shown(KEYS[name]), trusted=trusted)
            assert codes == LET_IN | dict.fromkeys(OF_ADMINS, NO)
        codes = await service.codes(shown(KEYS["boss"]), trusted=trusted)
        assert codes == dict.fromkeys(METHODS, NO) | {name: LET_IN[name] for name in (*OF_ADMINS, "reflection")}
        assert await service.codes(trusted, trusted=trusted) == LET_IN


async def test_a_token_alone_is_wanted_for_everything(token):
    async with serving(grpc_token_file=str(token)) as service:
        trusted = shown(token.read_text().strip())
        assert set((await service.refusals(())).values()) == {WHO}
        assert await service.codes(trusted, trusted=trusted) == LET_IN


async def test_a_refusal_says_why(keys):
    async with serving(api_keys_file=str(keys)) as service:
        for metadata, reason, sentence in (
            ((), "INVALID_API_KEY", "send the metadata 'authorization: Bearer KEY'"),
            (shown("tk-unknown"), "INVALID_API_KEY", "this API key is not known here, or has expired"),
            (shown(KEYS["boss"]), "INSUFFICIENT_SCOPE", "this API key has not the scope 'inference'"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=sentence) as raised:
                await service.load(metadata)
            info = error_details_pb2.ErrorInfo()
            rpc_status.from_call(raised.value).details[0].Unpack(info)
            assert info.reason == reason
            assert "tk-" not in raised.value.details()


async def test_health_is_for_everybody(keys):
    async with serving(api_keys_file=str(keys)) as service:
        answer = await health_pb2_grpc.HealthStub(service.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(("with_token", "code"), [(False, OK), (True, WHO)])
async def test_a_certificate_opens_sessions_where_there_is_no_token(keys, token, tmp_path, with_token, code):
    authority = Authority(tmp_path)
    given = flags(authority, authority.issue("scheduler")) | ({"grpc_token_file": str(token)} if with_token else {})
    dialer = Dialer.of(links(authority, authority.issue("gateway")))
    worker = f"unix:{tmp_path}/worker.sock"
    async with serving(dialer, worker_listen=worker, api_keys_file=str(keys), **given) as service:
        codes = {name: await ends(call) for name, call in service.calls().items()}
        assert codes == dict.fromkeys(METHODS, WHO) | {"Session": code}


# What a key's own calls are


async def test_a_key_has_so_many_calls_at_once(keys):
    async with serving(api_keys_file=str(keys)) as service:
        service.worker.hold()
        first = service.stub.Generate(request(), metadata=shown(KEYS["one-at-a-time"]))
        assert (await first.read()).HasField("accepted")
        with pytest.raises(grpc.aio.AioRpcError, match="its limit") as raised:
            await service.stub.Generate(request(), metadata=shown(KEYS["one-at-a-time"])).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        details = rpc_status.from_call(raised.value).details
        assert any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)
        others = service.stub.Generate(request(), metadata=shown(KEYS["team"]))
        assert (await others.read()).HasField("accepted")
        for name in ("Forecast", "Tokenize", "Detokenize"):  # which compute, too
            assert await ends(service.calls(shown(KEYS["one-at-a-time"]))[name]) is grpc.StatusCode.RESOURCE_EXHAUSTED
        service.worker.release()
        assert await ends(first) is await ends(others) is OK
        assert await ends(service.stub.Generate(request(), metadata=shown(KEYS["one-at-a-time"]))) is OK


async def test_a_call_that_is_not_read_gives_its_key_s_place_back(keys):
    async with serving(api_keys_file=str(keys), slow_client_seconds=0.2) as service:
        mine, output = shown(KEYS["one-at-a-time"]), generate_pb2.Output(logprobs=True, top_logprobs=20)
        unread = service.stub.Generate(request(200, n=250, output=output), metadata=mine)
        assert (await unread.read()).HasField("accepted")
        assert await ends(service.stub.Generate(request(), metadata=mine)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        while await ends(service.stub.Generate(request(), metadata=mine)) is not OK:
            pass
        assert not unread.done()


async def test_a_key_has_so_many_tokens_a_minute_and_what_was_not_made_comes_back(keys):
    async with serving(api_keys_file=str(keys)) as service:
        mine = shown(KEYS["thrifty"])

        async def code(**fields) -> grpc.StatusCode:
            return await ends(service.stub.Generate(request(**fields), metadata=mine))

        assert await code(max_tokens=2000) is grpc.StatusCode.INVALID_ARGUMENT
        outputs = [each.outputs async for each in service.stub.Generate(request(), metadata=mine)]
        first = next(sample.token_ids[0] for each in outputs for sample in each.samples if sample.token_ids)
        most = 600 - len(request().tokens.token_ids)
        for _ in range(3):
            assert await code(max_tokens=most, stop_token_ids=[first]) is OK
        service.worker.hold()
        held = service.stub.Generate(request(most), metadata=mine)
        assert (await held.read()).HasField("accepted")
        assert await code(max_tokens=most) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await code(max_tokens=most, model="another") is grpc.StatusCode.NOT_FOUND
        service.worker.release()
        assert await ends(held) is OK


@pytest.mark.slow
async def test_a_call_that_its_client_leaves_costs_what_was_made_of_it_read_or_not(keys):
    mine, made, asked = shown(KEYS["open"]), 1900, request()
    asked.stopping.ClearField("max_tokens")
    async with serving(api_keys_file=str(keys)) as service:
        service.worker.hold()
        service.worker.release(plans=made)
        call = service.stub.Generate(asked, metadata=mine)
        assert (await call.read()).HasField("accepted")
        while (await service.load(shown(KEYS["team"]))).counters.generated_tokens < made:
            pass
        call.cancel()
        while (await service.load(shown(KEYS["team"]))).running_sequences:
            pass
        with pytest.raises(grpc.aio.AioRpcError, match="this API key has 0 of its 1100 tokens a minute left"):
            await service.stub.Generate(asked, metadata=mine).read()


async def test_a_key_hears_of_its_own_requests_only(keys):
    async with serving(api_keys_file=str(keys)) as service:
        service.worker.hold()
        call = service.stub.Generate(request(request_id="mine"), metadata=shown(KEYS["team"]))
        assert (await call.read()).HasField("accepted")
        asked = observe_pb2.ForecastRequest(request_id="mine")
        await service.stub.Forecast(asked, metadata=shown(KEYS["team"]))
        with pytest.raises(grpc.aio.AioRpcError, match="no unfinished request") as raised:
            await service.stub.Forecast(asked, metadata=shown(KEYS["other"]))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        service.worker.release()
        assert await ends(call) is OK


@pytest.mark.parametrize(("isolate_keys", "cached"), [(False, True), (True, False)])
async def test_keys_share_cached_prefixes_unless_they_are_isolated(keys, isolate_keys, cached):
    async with serving(api_keys_file=str(keys), isolate_keys=isolate_keys) as service:

        async def cached_tokens(name: str, **fields) -> int:
            call = service.stub.Generate(request(**fields), metadata=shown(KEYS[name]))
            finishes = [
                sample.finish
                async for response in call
                for sample in response.outputs.samples
                if sample.HasField("finish")
            ]
            return finishes[0].usage.cached_prompt_tokens

        assert await cached_tokens("team") == 0
        assert await cached_tokens("team") > 0
        assert (await cached_tokens("other") > 0) is cached
        assert await cached_tokens("team", cache_salt="s") == 0
        assert await cached_tokens("team", cache_salt="s") > 0
        assert (await cached_tokens("other", cache_salt="s") > 0) is cached


# Files


async def test_a_new_token_counts_without_a_restart(token, monkeypatch):
    monkeypatch.setattr(file_watch, "CHECK_EVERY_S", 0.0)
    async with serving(grpc_token_file=str(token)) as service:
        old, new = token.read_text().strip(), "a-token-that-is-new"
        token.write_text(new)
        with pytest.raises(grpc.aio.AioRpcError):
            await service.load(shown(old))
        await service.load(shown(new))
        token.write_text("short")
        with capture_logs() as logs:
            await service.load(shown(new))
        assert "expected one word of 16 or more" in logs[0]["reason"]


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words that are long", "ä" * 20, "line-of-a-token\nand-another-line"]
)
def test_a_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    path.write_text(content)
    with pytest.raises(InvalidRequest, match=f"flag grpc_token_file={path}: expected one word"):
        TokenFile(str(path))
    with pytest.raises(InvalidRequest, match="cannot be read"):
        TokenFile(str(tmp_path / "none"))


def test_a_token_that_others_may_read_is_warned_of(token):
    with capture_logs() as logs:
        TokenFile(str(token))
        assert logs == []
        token.chmod(0o644)
        TokenFile(str(token))
    assert [(entry["log_level"], entry["flag"]) for entry in logs] == [("warning", "grpc_token_file")]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, "other hosts may call without credentials"),
        ({"api_keys_file": "k"}, "cross the network unencrypted"),
        ({"grpc_token_file": "t"}, "cross the network unencrypted"),
        ({"grpc_cert": "c", "grpc_key": "k"}, "other hosts may call without credentials"),
        ({"grpc_cert": "c", "grpc_key": "k", "grpc_ca": "a"}, ""),
        ({"api_keys_file": "k", "grpc_cert": "c", "grpc_key": "k"}, ""),
    ],
)
def test_a_scheduler_says_what_is_dangerous_about_its_address(given, reason):
    assert reason in exposure(SchedulerConfig(scheduler_listen="0.0.0.0:1", **given))
    assert bool(exposure(SchedulerConfig(scheduler_listen="[::]:1", **given))) is bool(reason)
    for own in ("127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/run/s.sock"):
        assert exposure(SchedulerConfig(scheduler_listen=own, **given)) == ""
