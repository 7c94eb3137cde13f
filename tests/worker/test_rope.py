"""Every kind of rope scaling gives the angles, logits and tokens of transformers."""

import warnings

import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from services.common.errors import InvalidRequest
from services.common.model.context_length import context_length
from services.common.model.files import read_card
from services.common.model.json_object import read_json
from services.worker.described.registry import read_model_config
from services.worker.described.rope import read_rope
from services.worker.layers.rotary import Rotary
from tests.checkpoints import LLAMA3_ROPE
from tests.worker.test_generation import greedy, prompt_of
from tests.worker.test_models import logits_of, write_config

CPU = torch.device("cpu")
HEAD_DIM, ORIGINAL, SERVED = 16, 128, 512
SHORT, LONG = [1.0 + i / 10 for i in range(HEAD_DIM // 2)], [1.5 + i for i in range(HEAD_DIM // 2)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
LONGROPE |= {"original_max_position_embeddings": ORIGINAL}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN,
    "yarn attention factor": YARN | {"attention_factor": 0.7},
    "yarn mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn one mscale": YARN | {"mscale": 0.8},
    "yarn betas": YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False},
    "yarn small factor": YARN | {"factor": 0.5},
    "longrope": LONGROPE,
    "longrope factor": LONGROPE | {"factor": 16.0},
    "longrope attention factor": LONGROPE | {"attention_factor": 1.3},
}


def theirs(config: transformers.LlamaConfig, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return transformers' cosines and sines of one forward pass over ``positions``."""
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), positions[None])
    return cos[0], sin[0]


def ours(config: dict, served: int, head_dim: int = HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our cosines and sines of all positions, with the signs of transformers."""
    rotary = Rotary(read_rope(config, head_dim), head_dim, served, torch.float32, CPU)
    signs = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    return rotary.cos, rotary.sin * signs


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("older", [False, True], ids=["transformers 5", "transformers 4"])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_angles_are_those_of_transformers(settings, older, theta):
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": SERVED}
    if older:
        changed = {name: value for name, value in settings.items() if name != "rope_type"}
        written = sizes | {"rope_theta": theta, "rope_scaling": changed | {"type": settings["rope_type"]}}
    else:
        written = sizes | {"rope_parameters": settings | {"rope_theta": theta}}
    reference = transformers.LlamaConfig(**sizes, rope_parameters=settings | {"rope_theta": theta})
    for found, expected in zip(ours(written, SERVED), theirs(reference, torch.arange(SERVED)), strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("settings", [YARN, YARN | {"truncate": False}, LLAMA3_ROPE])
def test_angles_of_far_positions_are_those_of_transformers(settings):
    """A difference in the last bit of a frequency would show."""
    far, size = 1 << 16, 64
    written = {"head_dim": size, "max_position_embeddings": far, "rope_parameters": settings | {"rope_theta": 10000.0}}
    expected = theirs(transformers.LlamaConfig(**written), torch.arange(far))
    torch.testing.assert_close(ours(written, far, size), expected, atol=1e-6, rtol=0)


def test_a_length_beside_the_settings_overrides_the_one_among_them():
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": SERVED, "original_max_position_embeddings": 64}
    reference = transformers.LlamaConfig(**sizes, rope_parameters=YARN | {"rope_theta": 10000.0})
    found, expected = ours(sizes | {"rope_parameters": YARN}, SERVED), theirs(reference, torch.arange(SERVED))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_original_context_of_phi3_has_a_default_that_overrides_the_one_among_the_settings(checkpoint, tmp_path):
    changes = {"rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0}, "original_max_position_embeddings": ...}
    changed = write_config(checkpoint("phi3"), tmp_path, **changes)
    theirs = transformers.AutoConfig.from_pretrained(changed).rope_parameters["original_max_position_embeddings"]
    (rope,) = read_model_config(read_json(changed / "config.json")).ropes
    assert rope.original_max_position_embeddings == theirs != ORIGINAL


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt_oss", "gemma3"])
def test_an_older_key_overrides_the_rotation_of_a_file(architecture, checkpoint, tmp_path):
    """transformers then takes the base from elsewhere too."""
    changed = write_config(checkpoint(architecture), tmp_path, rope_scaling=YARN | {"factor": 3.0})
    theirs = transformers.AutoConfig.from_pretrained(changed).rope_parameters
    found = read_model_config(read_json(changed / "config.json")).ropes[0]
    expected = theirs.get("full_attention", theirs)
    assert (found.kind, found.factor, found.theta) == ("yarn", 3.0, expected["rope_theta"])


@pytest.mark.parametrize("changes", [{}, {"original_max_position_embeddings": 64}], ids=["", "length beside"])
def test_angles_of_gemma3_are_those_of_transformers(changes, checkpoint, tmp_path):
    """Settings of one type of layer do without some of those beside them."""
    yarn = YARN | {"rope_theta": 10000.0, "truncate": False}
    nested = {"full_attention": yarn, "sliding_attention": yarn | {"factor": 2.0, "rope_theta": 1000.0}}
    changes |= {"rope_parameters": nested, "layer_types": [*nested, "sliding_attention"]}
    changed = write_config(checkpoint("gemma3"), tmp_path, **changes)
    made = read_model_config(read_json(changed / "config.json"))
    reference = Gemma3RotaryEmbedding(transformers.AutoConfig.from_pretrained(changed))
    positions = torch.arange(SERVED)
    for rope, kind in zip(made.ropes, nested, strict=True):
        rotary = Rotary(rope, made.head_dim, SERVED, torch.float32, CPU)
        cos, _ = reference(torch.zeros(1), positions[None], kind)
        torch.testing.assert_close(rotary.cos, cos[0], atol=1e-5, rtol=0)


def test_longrope_has_its_short_factors_where_no_longer_context_is_served():
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": SERVED}
    reference = transformers.LlamaConfig(**sizes, rope_parameters=LONGROPE | {"rope_theta": 10000.0})
    found = ours(sizes | {"rope_parameters": LONGROPE}, ORIGINAL)
    torch.testing.assert_close(found, theirs(reference, torch.arange(ORIGINAL)), atol=1e-5, rtol=0)


def test_dynamic_scaling_rotates_each_position_as_the_last_of_its_sequence():
    sizes = {"head_dim": HEAD_DIM, "max_position_embeddings": ORIGINAL}
    reference = transformers.LlamaConfig(**sizes, rope_parameters=DYNAMIC | {"rope_theta": 10000.0})
    found = ours(sizes | {"rope_parameters": DYNAMIC}, SERVED)
    for expected, some in zip(theirs(reference, torch.arange(ORIGINAL)), found, strict=True):
        torch.testing.assert_close(some[:ORIGINAL], expected, atol=1e-5, rtol=0)
    for position in (ORIGINAL, ORIGINAL + 1, 300, SERVED - 1):
        for expected, some in zip(theirs(reference, torch.arange(position + 1)), found, strict=True):
            torch.testing.assert_close(some[position], expected[position], atol=1e-4, rtol=0)


def step_by_step(model: torch.nn.Module, token_ids: list[int], prompt: int) -> torch.Tensor:
    """Return the logits after each token, where all behind the first ``prompt`` are computed one at a time."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.24 gives ``past_key_values`` another name
        output = model(torch.tensor([token_ids[:prompt]]), use_cache=True)
        logits = [output.logits[0]]
        for token in token_ids[prompt:]:
            output = model(torch.tensor([[token]]), cache=output.cache, use_cache=True)
            logits.append(output.logits[0])
    return torch.cat(logits)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("settings", [YARN, LONGROPE], ids=["yarn", "longrope"])
def test_logits_beyond_the_original_context(settings, architecture, checkpoint, reference):
    settings = scaled_for(settings, architecture)
    directory = checkpoint(architecture, rope_scaling=settings, max_position_embeddings=SERVED)
    token_ids = prompt_of(300)
    with torch.inference_mode():
        expected = reference(directory)(torch.tensor([token_ids])).logits[0]
    torch.testing.assert_close(logits_of(directory, token_ids), expected, atol=1e-4, rtol=0)


def scaled_for(settings: dict, architecture: str) -> dict:
    """Return the settings with factors for the size of the architecture's heads."""
    if settings is not LONGROPE or architecture != "qwen3":
        return settings
    return settings | {"short_factor": SHORT * 2, "long_factor": LONG * 2}


def test_logits_of_dynamic_scaling_are_those_of_generation_token_by_token(checkpoint, reference):
    directory = checkpoint("llama", rope_scaling=DYNAMIC, max_position_embeddings=ORIGINAL)
    token_ids = prompt_of(300)
    expected = step_by_step(reference(directory), token_ids, ORIGINAL - 20)
    torch.testing.assert_close(logits_of(directory, token_ids), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("settings", "length", "flags"),
    [
        (YARN, 20, {}),
        (YARN, 120, {}),
        (YARN, 150, {}),
        (LONGROPE, 20, {"max_context_tokens": ORIGINAL}),
        (LONGROPE, 150, {}),
    ],
)
def test_greedy_tokens_are_those_of_transformers(settings, length, flags, checkpoint, reference, runner_for):
    directory, prompt = checkpoint("llama", rope_scaling=settings, max_position_embeddings=SERVED), prompt_of(length)
    (tokens,) = runner_for(directory, **flags).generate([prompt], 30, chunk=60)
    assert tokens == greedy(reference(directory), prompt, 30)


def test_greedy_tokens_of_dynamic_scaling_go_on_beyond_the_original_context(checkpoint, reference, runner_for):
    directory, prompt = checkpoint("llama", rope_scaling=DYNAMIC, max_position_embeddings=ORIGINAL), prompt_of(60)
    (tokens,) = runner_for(directory).generate([prompt], 125, chunk=40)
    logits = step_by_step(reference(directory), prompt + tokens[:-1], len(prompt))
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == tokens


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, 2048),
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 16384, "rope_parameters": YARN}, 16384),
        ({"max_position_embeddings": 256, "rope_parameters": YARN}, 512),
        ({"max_position_embeddings": 256, "rope_parameters": {"full_attention": YARN, "sliding_attention": {}}}, 512),
        ({"max_position_embeddings": 4096, "rope_parameters": LONGROPE}, 4096),
        ({"max_position_embeddings": 4096, "rope_parameters": LLAMA3_ROPE}, 4096),
    ],
)
def test_contexts_are_as_long_as_the_scaling_makes_them(config, length):
    assert context_length(config) == length


def test_scheduler_and_worker_read_the_same_length(checkpoint, runner_for):
    directory = checkpoint("llama", rope_scaling=DYNAMIC, max_position_embeddings=ORIGINAL)
    assert read_card(str(directory)).max_context_tokens == SERVED
    assert runner_for(directory).runner.limits.max_context_tokens == SERVED


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "proportional"}, "rope type 'proportional' is not supported; default, linear, dynamic, yarn"),
        ({"rope_type": "yarn"}, "rope type 'yarn' needs factor, which is missing"),
        ({"rope_type": "dynamic"}, "rope type 'dynamic' needs factor, which is missing"),
        ({"rope_type": "longrope", "long_factor": LONG}, "rope type 'longrope' needs short_factor, which is missing"),
        ({"full_attention": YARN}, "rope_parameters has settings of its own for 'full_attention', which are not supp"),
        (LONGROPE | {"long_factor": [1.0]}, "long_factor has 1 entries; expected 8, one for each pair"),
    ],
)
def test_settings_that_cannot_be_followed_are_refused(settings, message):
    with pytest.raises(InvalidRequest, match=message):
        read_rope({"rope_parameters": settings}, HEAD_DIM)
