"""instructor's typed answers from our servers. Needs ``pip install 'tokasaurus[ecosystem]'``."""

import asyncio
from enum import StrEnum
from typing import Annotated, Literal

import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, StringConstraints

from bench.server import Server, serve
from services.common.text.tokenizer import Tokenizer
from tests.gateway.parrot import QWEN, make_model

instructor = pytest.importorskip("instructor", reason="instructor is not installed")

pytestmark = pytest.mark.filterwarnings("default")  # what others warn of each other is not ours

PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}  # the built-in model finds no end to its thoughts
MODES = [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS]
Word = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,8}$")]


class Kind(StrEnum):
    FRUIT = "fruit"
    TOOL = "tool"


class Price(BaseModel):
    """Bounded, so that whatever the model would like to say comes to an end."""

    amount: int = Field(ge=1, le=99)
    currency: Literal["EUR", "USD"]


class Item(BaseModel):
    """A thing on a list."""

    name: Word
    kind: Kind
    price: Price
    sold: bool
    tags: list[Word] = Field(max_length=2)
    note: Word | None


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Server:
    """The real services, and the built-in model under a template that has tools."""
    model = make_model(tmp_path_factory.mktemp("instructor") / "model", QWEN)
    with serve(model=model, device="cpu", dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def server_settings(server) -> dict:
    """Of each request. A bias against blanks, which the model likes; and no second attempt, since it is what the first
    says that is tested."""
    pieces = Tokenizer.load("builtin").vocabulary.token_bytes
    return {
        "model": server.model,
        "messages": [{"role": "user", "content": "Tom buys three apples at 2 EUR each and puts them on his list."}],
        "max_tokens": 300,
        "max_retries": 0,
        "strict": False,  # instructor's own: Python's enumerations are told by their values
        "logit_bias": {str(token): -50 for token, piece in enumerate(pieces) if piece and not piece.strip()},
        "extra_body": PLAIN,
    }


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def mode(request):
    return request.param


@pytest.fixture
def asking(server, mode):
    with OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        yield instructor.from_openai(sdk, mode=mode)


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_answer_is_an_object_of_the_class_asked_for(asking, server_settings, temperature):
    item, raw = asking.create_with_completion(
        response_model=Item, temperature=temperature, seed=temperature, **server_settings
    )
    assert isinstance(item, Item)
    assert raw.usage.completion_tokens < server_settings["max_tokens"]


async def test_many_at_once_are_objects_that_differ(server, mode, server_settings):
    async with AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0) as sdk:
        asking = instructor.from_openai(sdk, mode=mode)
        items = await asyncio.gather(
            *(asking.create(response_model=Item, temperature=1, seed=seed, **server_settings) for seed in range(8))
        )
    assert all(isinstance(item, Item) for item in items)
    assert len({item.model_dump_json() for item in items}) > 1


def test_a_stream_grows_to_the_object(asking, server_settings):
    grown = list(asking.create_partial(response_model=Item, temperature=1, seed=3, **server_settings))
    assert len(grown) > 3
    assert grown[0].note is None  # which comes last
    Item.model_validate_json(grown[-1].model_dump_json())  # raises where anything lacks
