"""Requests have the defaults of the model's ``generation_config.json`` for what they leave out."""

import json
import shutil

import pytest

from services.common.model.files import BUILTIN
from tests.scheduler.service import PROMPT, start
from tokasaurus.scheduler.v1 import generate_pb2 as g
from tokasaurus.scheduler.v1 import observe_pb2 as o

TOKENS = g.TokenPrompt(token_ids=PROMPT)
GENERATION = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "min_p": 0.125, "repetition_penalty": 1.25}
GENERATION |= {"max_new_tokens": 5, "eos_token_id": [0, 1]}


@pytest.fixture
def model(tmp_path):
    directory = shutil.copytree(BUILTIN, tmp_path / "model")
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    return str(directory)


async def test_a_request_has_the_models_defaults_for_what_it_leaves_out(model):
    async with start(model=model) as service:
        service.worker.record = True
        await service.generate(tokens=TOKENS)
        asked = g.Sampling(temperature=1, top_p=1, top_k=0, min_p=0, repetition_penalty=1)
        await service.generate(tokens=TOKENS, sampling=asked, stopping=g.Stopping(max_tokens=7))
        await service.generate(tokens=TOKENS, stopping=g.Stopping(min_tokens=6))
        found = [
            [
                getattr(admission.sampling.parameters, name)
                for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
            ]
            for plan in service.worker.plans
            for admission in plan.admissions
        ]
        generated = (await service.load()).counters.generated_tokens
    assert found == [[0.5, 0.75, 20, 0.125, 1.25], [1, 1, 0, 0, 1], [0.5, 0.75, 20, 0.125, 1.25]]
    assert generated == 5 + 7 + 6


async def test_the_models_defaults_are_in_its_description(model):
    async with start(model=model) as service:
        described = (await service.stub.GetModel(o.GetModelRequest())).model
    expected = g.Sampling(temperature=0.5, top_p=0.75, top_k=20, min_p=0.125, repetition_penalty=1.25)
    assert described.default_sampling == expected
    assert described.default_max_tokens == 5
