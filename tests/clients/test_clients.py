"""The example clients against a real scheduler: each says the same, line by line."""

import asyncio
import os
from contextlib import asynccontextmanager

import pytest

from services.common.config import SchedulerConfig
from services.common.keys import hash_of, new_key
from services.common.rpc.channel import PLAIN, Dialer
from services.common.text.tokenizer import Tokenizer
from services.scheduler.api.model import CONTRACT_VERSION
from services.scheduler.server import SchedulerServer
from tests.clients.builds import ROOT, Built, build
from tests.common.rpc.authority import Authority, flags, links
from tests.fakes.model import reply_script
from tests.fakes.worker import FakeWorker
from tests.scheduler.service import Service, start
from tokasaurus.scheduler.v1 import generate_pb2

REPLY = " He pays 3 * 7 + 4 * 2 = 29 €, n'est-ce pas? 漢字"
EOS = 0
CONTEXT, PROMPT_TOKENS = 2048, 34
STEP_S = 0.01  # slow enough to be cancelled, and to be overdue
KEY = new_key()
TOOLCHAINS = [pytest.mark.toolchains, pytest.mark.timeout(900)]
LANGUAGES = ["python", "node", pytest.param("go", marks=TOOLCHAINS), pytest.param("java", marks=TOOLCHAINS)]


@pytest.fixture(scope="module", params=LANGUAGES)
def client(request, tmp_path_factory) -> Built:
    return build(request.param, tmp_path_factory.mktemp(request.param))


async def run(client: Built, address: str, **environment: str) -> tuple[int, list[str], list[str]]:
    """Exit status, and the lines of both outputs."""
    process = await asyncio.create_subprocess_exec(
        *client.command,
        address,
        cwd=client.directory,
        env={name: value for name, value in os.environ.items() if not name.startswith("TOKA_")}
        | client.environment
        | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, out.decode().splitlines(), err.decode().splitlines()


async def test_a_client_streams_cancels_keeps_a_deadline_and_reads_an_error(client):
    reply = [*Tokenizer.load("builtin").encode(REPLY, add_special_tokens=False), EOS]
    async with start(worker=FakeWorker(script=reply_script(reply), step_s=STEP_S)) as service:
        status, out, err = await run(client, service.server.address)
        assert (status, err) == (0, [])
        assert out.pop(5) in ("deadline: DEADLINE_EXCEEDED", "deadline: FINISH_REASON_DEADLINE")
        assert out == [
            f"model: tokasaurus-builtin, contract {CONTRACT_VERSION}, {CONTEXT} tokens of context",
            f"accepted: {PROMPT_TOKENS} prompt tokens",
            f"answer:{REPLY}",
            f"finish: FINISH_REASON_STOP, {len(reply)} tokens",
            "cancelled: CANCELLED",
            "error: INVALID_ARGUMENT, INVALID_REQUEST",
            "message: top_p is 3: expected more than 0 and at most 1",
            "field: sampling.top_p",
        ]
        load = await service.until_load(lambda load: not load.running_sequences)
        assert load.counters.requests_accepted == 3
        assert load.counters.sequences_cancelled in (1, 2)  # what the client's own clock ends counts, too
        assert load.counters.generated_tokens < CONTEXT - PROMPT_TOKENS  # of which an endless sample has so many


async def test_a_client_shows_certificates_and_a_key_and_is_told_when_to_come_back(client, tmp_path):
    authority = Authority(tmp_path) if client.tls else None
    async with guarded(authority, tmp_path) as service:
        address, shown = service.server.address, {}
        if authority is not None:
            address = address.replace("127.0.0.1", "localhost")  # Node warns of certificates for addresses
            pair = authority.issue("client")
            files = {"TOKA_GRPC_CA": authority.cert, "TOKA_GRPC_CERT": pair.cert, "TOKA_GRPC_KEY": pair.key}
            shown = {name: str(path) for name, path in files.items()}
        service.worker.hold()
        prompt = generate_pb2.TokenPrompt(token_ids=[40])
        running = service.stub.Generate(
            generate_pb2.GenerateRequest(tokens=prompt), metadata=[("authorization", f"Bearer {KEY}")]
        )
        assert (await running.read()).HasField("accepted")
        status, out, err = await run(client, address, **shown, TOKA_API_KEY=KEY)
        assert (status, [line.partition(":")[0] for line in out]) == (1, ["model"])
        assert err == [
            "error: RESOURCE_EXHAUSTED, RATE_LIMIT_EXCEEDED",
            "message: 1 requests of this API key are running, which is its limit; try again later",
            "retry: after 1000 ms",
        ]
        running.cancel()
        service.worker.release()

        status, out, err = await run(client, address, **shown, TOKA_API_KEY="tk-nobodys")
        assert (status, out) == (1, [])
        assert err == [
            "error: UNAUTHENTICATED, INVALID_API_KEY",
            "message: this API key is not known here, or has expired",
        ]


def test_a_readme_says_what_was_run():
    """But for the registries: what is installed from there, and how Maven and Go's modules get it."""
    for language, commands in {
        "python": ("python client.py",),
        "node": ("npm ci", "node client.js"),
        "go": ("./generate.sh", "go run ."),
        "java": ("mvn -q compile exec:java",),
    }.items():
        readme = (ROOT / "examples/clients" / language / "README.md").read_text()
        assert [command for command in commands if command not in readme] == []


def test_nodes_packages_name_no_registry():
    assert "resolved" not in (ROOT / "examples/clients/node/package-lock.json").read_text()


@asynccontextmanager
async def guarded(authority: Authority | None, directory):
    """A scheduler that wants certificates of ``authority``, and a key of which one request may run at once."""
    (directory / "keys.toml").write_text(f'[[keys]]\nname = "team"\nhash = "{hash_of(KEY)}"\nmax_concurrent = 1\n')
    worker = FakeWorker()
    server = SchedulerServer(
        SchedulerConfig(
            worker_addresses=(await worker.start(f"unix:{directory}/worker.sock"),),
            scheduler_listen="127.0.0.1:0",
            api_keys_file=str(directory / "keys.toml"),
            **(flags(authority, authority.issue("scheduler")) if authority else {}),
        )
    )
    dialer = Dialer.of(links(authority, authority.issue("gateway"))) if authority else PLAIN
    try:
        async with dialer.open_aio(await server.start()) as channel:
            await channel.channel_ready()  # a first handshake may fail where everything is slow
            service = Service([worker], server, channel)
            await service.until_health(True)
            yield service
    finally:
        await server.stop()
        await worker.stop()
    assert worker.violations == []
