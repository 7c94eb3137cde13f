"""Something goes wrong with one request on its way in or out: it ends with INTERNAL, and nothing else happens."""

import grpc
import pytest
from google.rpc import code_pb2

from services.common.errors import Internal
from services.scheduler.api import encoding, generate, validation
from services.scheduler.api.hub import Hub
from services.scheduler.api.mailbox import Mailbox
from services.scheduler.api.pending_grammars import PendingGrammars
from services.scheduler.core.life.intake import Intake
from services.scheduler.grammar.checker import GrammarChecker
from tests.fakes.model import continuation
from tests.scheduler.service import PROMPT, Client, Service, session, status_of
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import session_pb2

BAD = 50  # handle of the request that something goes wrong with, and its seed


def request(seed: int, **fields) -> dict:
    return {
        "request_id": f"r{seed}",
        "tokens": g.TokenPrompt(token_ids=PROMPT),
        "sampling": g.Sampling(seed=seed),
        "stopping": g.Stopping(max_tokens=40),
    } | fields


@pytest.fixture
def break_at(monkeypatch):
    """``break_at(owner, name, concerns)``: from here on the function raises where ``concerns(*arguments)``."""

    def install(owner, name: str, concerns) -> None:
        original = getattr(owner, name)

        def breaking(*args, **kwargs):
            if concerns(*args, **kwargs):
                raise RuntimeError("injected: a secret of somebody")
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, breaking)

    return install


@pytest.mark.parametrize(
    ("owner", "name", "concerns"),
    [
        (validation, "read_request", lambda message, *_, **__: message.request_id == f"r{BAD}"),
        (validation, "out_of_range", lambda parameters: parameters.seed == BAD),
        (Intake, "_resolve", lambda self, request: request.handle == BAD),
        (PendingGrammars, "check_handles", lambda self, request: request.handle == BAD),
    ],
)
async def test_a_request_that_cannot_be_read_or_queued_is_rejected(service, owner, name, concerns, break_at):
    break_at(owner, name, concerns)
    async with session(service) as client:
        await _submit_all(client)
        await _check_others(service, client)
        await client.decided(BAD)
        assert client.rejected[BAD].code == code_pb2.INTERNAL
        assert client.rejected[BAD].message == Internal.logged().message


async def test_a_grammar_that_cannot_be_checked_rejects_its_request(service, break_at):
    break_at(GrammarChecker, "is_cached", lambda self, grammar: False)
    break_at(GrammarChecker, "_check_capacity", lambda self, client, new: True)
    async with session(service) as client:
        await _submit_all(client, sampling=g.Sampling(seed=BAD, grammar=g.Grammar(regex="[ab]{3}")))
        await _check_others(service, client)
        await client.decided(BAD)
        assert client.rejected[BAD].code == code_pb2.INTERNAL


@pytest.mark.parametrize(
    ("name", "concerns"),
    [
        ("encode_outputs", lambda delta: BAD in delta.handles.tolist()),
        ("encode_finish", lambda finish: finish.handle == BAD and finish.error is None),
        ("encode_finish", lambda finish: finish.handle == BAD),
    ],
)
async def test_news_that_cannot_be_written_end_their_request(service, name, concerns, break_at):
    break_at(encoding, name, concerns)
    async with session(service) as client:
        await _submit_all(client)
        await client.finished(BAD)
        await _check_others(service, client)
        bad = client.samples[BAD]
        assert bad.finish.reason == g.FINISH_REASON_ERROR
        assert bad.finish.error.message == Internal.logged().message
        assert bad.tokens == continuation(service.worker.shape, PROMPT, 40, seed=BAD)[: len(bad.tokens)]


async def test_a_text_that_cannot_be_made_ends_its_call(service, break_at):
    break_at(generate.GenerateCall, "_text", lambda self, text, tokens, finish: self._stops == [b"bad"])
    async with session(service) as client:
        await client.submit(0, **request(0))
        bad = request(BAD, stopping=g.Stopping(max_tokens=40, strings=["bad"]), output=g.Output(text=True))
        error = await status_of(service.stub.Generate(g.GenerateRequest(**bad)))
        assert (error.code().name, error.details()) == ("INTERNAL", Internal.logged().message)
        samples = await service.generate(**request(7, output=g.Output(text=True)))
        assert samples[0].tokens == continuation(service.worker.shape, PROMPT, 40, seed=7)
        await client.finished(0)


async def test_a_stream_that_cannot_be_told_something_ends_and_others_are_told_theirs(service, break_at, monkeypatch):
    mailboxes, open_sink = [], Hub.open

    def opened(hub, **how):
        mailboxes.append(open_sink(hub, **how))
        return mailboxes[-1]

    monkeypatch.setattr(Hub, "open", opened)
    async with session(service) as client, session(service) as other:
        [(_, mailbox), _] = mailboxes
        break_at(Mailbox, "put", lambda self, item: self is mailbox)
        await client.submit(0, **request(99))
        await _submit_all(other)
        await _check_others(service, other)
        await _ends(client)


async def test_a_session_that_cannot_be_read_ends(service, break_at):
    break_at(PendingGrammars, "act_on", lambda self, handles, action: True)
    async with session(service) as client:
        await client.submit(0, **request(0))
        await client.send(cancel=session_pb2.Cancel(handles=[0]))
        await _ends(client)


async def _ends(client: Client) -> None:
    """The session ends with INTERNAL, and without what it came of."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await client.until(lambda message: False)
    assert (raised.value.code().name, raised.value.details()) == ("INTERNAL", Internal.logged().message)


async def _submit_all(client: Client, **bad) -> None:
    """The bad one among twenty others."""
    for handle in range(20):
        await client.submit(handle, **request(handle))
        if handle == 9:
            await client.submit(BAD, **request(BAD, **bad))


async def _check_others(service: Service, client: Client) -> None:
    await client.finished(*range(20))
    for handle in range(20):
        assert client.samples[handle].tokens == continuation(service.worker.shape, PROMPT, 40, seed=handle)
