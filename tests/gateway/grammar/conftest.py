"""Deployments with the real worker: only it follows grammars."""

import contextlib
from pathlib import Path

import pytest

from bench.server import free_port
from tests.gateway.deployment import Deployment, Process, eventually
from tests.gateway.parrot import LLAMA, QWEN, add_thinking_tokens, make_model

PATIENCE = 4  # times as long as for a deployment that loads no model


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(400))


def start(directory: Path, template: str, *, thinking_tokens: bool = False):
    """The built-in model under ``template``, on a real worker."""
    model, address = make_model(directory / "model", template), f"127.0.0.1:{free_port()}"
    if thinking_tokens:
        add_thinking_tokens(model)
    log = directory / "real_worker.log"
    worker = Process(log, "services.worker", model=model, worker_listen=address, device="cpu", dtype="float32")
    running = Deployment(directory, worker_address=address, scheduler={"model": model}, gateway={"model": model})
    running.worker = worker  # it ends with the others
    for _ in range(PATIENCE):
        with contextlib.suppress(AssertionError):
            eventually(lambda: "model ready" in log.read_text() or not worker.running)
            break
    return running


@pytest.fixture(scope="package")
def thinker(tmp_path_factory):
    """It thinks and calls tools as Qwen3 does."""
    running = start(tmp_path_factory.mktemp("thinker"), QWEN)
    running.wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="package")
def caller(tmp_path_factory):
    """It calls tools as Llama 3 does."""
    running = start(tmp_path_factory.mktemp("caller"), LLAMA)
    running.wait_ready()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def no_blanks(tokenizer):
    """A bias against blanks, which the built-in model likes: answers get to their end sooner."""
    pieces = tokenizer.vocabulary.token_bytes
    return {str(token): -50 for token, piece in enumerate(pieces) if piece and not piece.strip()}
