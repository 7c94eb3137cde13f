"""A deployment for Anthropic's SDK. The model answers with the text of the last turn that is not its own."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic

from tests.gateway.deployment import PATIENCE_S, Deployment
from tests.gateway.parrot import LLAMA, QWEN, make_model, start_parrot

# As the template of Qwen3, but the prompt shows at its beginning, and not at its end, whether the model is to think.
_THINKING = QWEN.replace("enable_thinking is defined and enable_thinking is false", "false")
TEMPLATE = '{%- if enable_thinking -%}{{- "<|system|>Think.<|end|>" -}}{%- endif -%}' + _THINKING


def sdk_of(deployment: Deployment, **arguments) -> Anthropic:
    return Anthropic(base_url=deployment.url, max_retries=0, timeout=PATIENCE_S, **{"api_key": "none"} | arguments)


@pytest.fixture(scope="package")
def claude(tmp_path_factory) -> Iterator[Deployment]:
    running = start_parrot(tmp_path_factory.mktemp("claude"), TEMPLATE)
    yield running
    running.stop()


@pytest.fixture
def client(claude) -> Iterator[Anthropic]:
    with sdk_of(claude) as made:
        yield made


@pytest.fixture(scope="package")
def name(claude) -> str:
    """The model's."""
    with sdk_of(claude) as made:
        return made.models.list().data[0].id


@pytest.fixture(scope="package")
def caller(tmp_path_factory) -> Iterator[Deployment]:
    """A model that calls tools as Llama 3 does, and answers at random as far as a grammar lets it."""
    directory = tmp_path_factory.mktemp("caller")
    model = make_model(directory / "model", LLAMA)
    running = Deployment(directory, scheduler={"model": model}, gateway={"model": model}).wait_ready()
    yield running
    running.stop()
