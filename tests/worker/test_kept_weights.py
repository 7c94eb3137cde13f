"""Weights of quantized checkpoints that stay quantized, computed by the reference forms on a CPU."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from services.common.config import WorkerConfig
from services.common.errors import InvalidRequest
from services.common.model.quantized.gguf import SCHEMES
from services.common.model.quantized.scheme import ALL, Scheme
from services.worker.described.config import ModelConfig
from services.worker.described.foreign import read_described
from services.worker.described.forms import IN_DTYPE, LayerForm, WeightForm, layer_forms
from services.worker.described.memory import FLOAT32, weight_bytes
from services.worker.described.ranks import Ranks
from services.worker.described.stages import layers_of
from services.worker.layers.factory import make_kept_linears, make_linear
from services.worker.layers.fp8 import FP8 as FP8_DTYPE
from services.worker.layers.fp8 import copy_rows
from services.worker.layers.grouped import GroupedLinear
from services.worker.layers.kernels import TorchKernels
from services.worker.layers.quantized_weight import QuantizedWeight, keeps
from services.worker.models import staging, weights
from services.worker.models.decoder import DecoderModel
from tests import quantized_files as files
from tests.quantized_files import compressed
from tests.quick import quick_if
from tests.worker.parallel.test_loading import grid
from tests.worker.small_models import CPU, one_sequence
from tests.worker.test_quantized_checkpoints import (
    EXPERTS,
    FLOAT,
    FP8,
    INT4,
    INT8,
    ROW,
    TOKENS,
    Case,
    awq,
    gptq,
)

# With two ranks, each part of a projection still has whole blocks of 128 x 128, and whole groups of 128.
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MOE = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
CASES: dict[str, tuple[Case, WeightForm]] = {
    "fp8-tensor": (Case(files.fp8(0, 0, name=".weight_scale", shape=()), FP8), WeightForm("fp8")),
    "fp8-row": (Case(files.fp8(1, 0, **ROW), compressed("float-quantized", FLOAT), "qwen2"), WeightForm("fp8")),
    "fp8-row-experts": (
        Case(files.fp8(1, 0, **ROW), compressed("float-quantized", FLOAT), "qwen3_moe", MOE),
        WeightForm("fp8"),
    ),
    "fp8-blocks": (Case(files.fp8(128, 128), BLOCKS, "qwen3"), WeightForm("fp8_blocks")),
    "fp8-blocks-experts": (Case(files.fp8(128, 128), BLOCKS, "qwen3_moe", MOE), WeightForm("fp8_blocks")),
    "gptq-32": (Case(files.gptq(32), gptq(32, sym=False)), WeightForm("grouped", 4, 32, True)),
    "gptq-128": (Case(files.gptq(128, symmetric=True), gptq(128), "qwen2"), WeightForm("grouped", 4, 128)),
    "gptq-32-order": (
        Case(files.gptq(32, order=True), gptq(32, sym=False, desc_act=True)),
        WeightForm("grouped", 4, 32, True, True),
    ),
    # Act-order means nothing if all inputs are one group.
    "gptq-rows": (Case(files.gptq(-1), gptq(-1, sym=False, desc_act=True)), WeightForm("grouped", 4, ALL, True)),
    "gptq-8-bits": (Case(files.gptq(32, bits=8), gptq(32, bits=8, sym=False)), WeightForm("grouped", 8, 32, True)),
    "awq-128": (Case(files.awq(128), awq(128), "qwen2"), WeightForm("grouped", 4, 128, True)),
    "int4-groups": (
        Case(files.pack_quantized(32), compressed("pack-quantized", INT4), "qwen3"),
        WeightForm("grouped", 4, 32, False),
    ),
    "int4-groups-order": (
        Case(files.pack_quantized(32, order=True), compressed("pack-quantized", INT4 | {"actorder": "group"}), "qwen2"),
        WeightForm("grouped", 4, 32, False, True),
    ),
    "int8-row": (Case(files.int8(-1), compressed("int-quantized", INT8)), WeightForm("grouped", 8, ALL, False)),
    "gptq-128-experts": (
        Case(files.gptq(128, symmetric=True), gptq(128), "qwen3_moe", MOE),
        WeightForm("grouped", 4, 128),
    ),
    "awq-32-experts": (
        Case(files.awq(32), awq(32), "mixtral", {"num_local_experts": 4}),
        WeightForm("grouped", 4, 32, True),
    ),
    "int8-row-experts": (
        Case(files.int8(-1), compressed("int-quantized", INT8), "qwen3_moe", MOE),
        WeightForm("grouped", 8, ALL, False),
    ),
    # Gates and ups of all experts are one tensor.
    "mxfp4-experts": (
        Case(files.mxfp4, MXFP4, "gpt_oss", {"num_local_experts": 4}, chosen=EXPERTS),
        WeightForm("mxfp4", 4, 32),
    ),
}


@pytest.fixture(scope="session")
def directories(checkpoint, tmp_path_factory):
    """``directories(case)``: the directory of a quantized checkpoint, and that of one with its values."""
    made: dict[int, tuple[Path, Path]] = {}

    def make(case: Case) -> tuple[Path, Path]:
        if id(case) not in made:
            source = checkpoint(case.architecture, **SIZES | case.sizes)
            place = tmp_path_factory.mktemp("kept") / "model"
            made[id(case)] = files.write_quantized(source, place, case.store, case.settings, chosen=case.chosen)
        return made[id(case)]

    return make


def config_of(path: Path) -> ModelConfig:
    """Return the description of the model in ``path``, a directory or a GGUF file."""
    return read_described(path, WorkerConfig(model=str(path)))[1]


def forms_of(path: Path, ranks: Ranks | None = None) -> list[LayerForm]:
    config = config_of(path)
    return layer_forms(config, ranks or Ranks(), range(len(config.layers)))


def kept_forms(path: Path, ranks: Ranks | None = None) -> set[WeightForm]:
    """Return the forms of the matrices that stay quantized."""
    return {form for each in forms_of(path, ranks) for form in each.kept}


def made_for(config: ModelConfig, ranks: Ranks, *, kept: bool) -> DecoderModel:
    """Return a model without values. If ``kept``, its weights stay as the checkpoint of ``config`` has them."""
    layers = layers_of(config, ranks.pp_size)[ranks.pp_rank]
    linear = make_linear(config, torch.float32, CPU, "none")
    makers = None
    if kept:
        makers = [make_kept_linears(each, torch.float32, CPU) for each in layer_forms(config, ranks, layers)]
    return DecoderModel(config, torch.float32, CPU, TorchKernels(), linear, makers, ranks=ranks, layers=layers)


def loaded(directory: Path, ranks: Ranks | None = None, *, kept: bool = True) -> DecoderModel:
    model = made_for(config_of(directory), ranks or Ranks(), kept=kept)
    weights.load(directory, model.targets(), model.config)
    return model


def values_of(model: DecoderModel) -> dict[str, torch.Tensor]:
    """Return the values of all tensors as products read them. Those of other ranks are zero."""
    found = {}
    for name, target in model.targets().items():
        found[name] = torch.zeros(target.shape)
        copy_rows(target, found[name])
    return found


def logits_of(model: DecoderModel) -> torch.Tensor:
    tokens = torch.tensor(TOKENS)
    with torch.inference_mode():
        hidden = model(tokens, torch.arange(len(tokens)), one_sequence(model.config, len(tokens))[1])
        return model.project(hidden)


def is_quantized(model: DecoderModel, name: str) -> bool:
    target = model.targets()[name]
    return hasattr(getattr(target, "target", target), "keeps")


@pytest.mark.parametrize(
    "ranks", quick_if(lambda ranks: ranks.tp_rank or ranks.pp_rank, [*grid(2, 1), *grid(1, 2), Ranks()]), ids=str
)
@pytest.mark.parametrize("name", CASES)
def test_weights_keep_exactly_the_values_of_the_checkpoint(name, ranks, directories):
    """The parts of a fused projection have different scales. Shares of inputs in act-order are converted."""
    case, form = CASES[name]
    form = IN_DTYPE if form.ordered and ranks.tp_size > 1 else form
    directory, exact = directories(case)
    assert kept_forms(directory, ranks) == {form} - {IN_DTYPE}
    model = loaded(directory, ranks)
    found, expected = values_of(model), values_of(loaded(exact, ranks, kept=False))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7)
    projections = [key for key in found if key.endswith("_proj.weight")]
    assert projections
    assert all(is_quantized(model, key) != (form.kind in ("mxfp4", "dtype")) for key in projections)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("experts")])
def test_whole_experts_of_ranks_keep_their_values(name, rank, directories):
    ranks = Ranks(rank, 2, whole_experts=True)
    directory, exact = directories(CASES[name][0])
    found, expected = values_of(loaded(directory, ranks)), values_of(loaded(exact, ranks, kept=False))
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_values(name, directories):
    """Products in fp8 round their inputs, which may also change a choice of experts."""
    case, form = CASES[name]
    directory, exact = directories(case)
    found, expected = logits_of(loaded(directory)), logits_of(loaded(exact, kept=False))
    if form.kind in ("grouped", "mxfp4"):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    else:
        assert 1e-4 < (found - expected).norm() / expected.norm() < (0.2 if case.sizes else 0.1)


@pytest.mark.parametrize("name", CASES)
def test_an_update_from_the_same_files_leaves_equal_weights(name, directories):
    directory, _ = directories(CASES[name][0])
    model, other = loaded(directory), made_for(config_of(directory), Ranks(), kept=True)
    staging.apply(staging.stage(directory, other, other.config), other)
    expected = dict(model.named_buffers()) | dict(model.named_parameters())
    for key, tensor in (*other.named_buffers(), *other.named_parameters()):
        assert torch.equal(tensor.view(torch.uint8), expected[key].view(torch.uint8)), key


def test_values_in_fp8_that_are_not_finite_are_refused_in_an_update(directories, tmp_path):
    directory, name = directories(CASES["fp8-row"][0])[0], "model.layers.0.mlp.up_proj.weight"
    shutil.copytree(directory, broken := tmp_path / "m")
    [path] = broken.glob("*.safetensors")
    tensors = load_file(path)
    tensors[name][3, 5] = float("nan")
    save_file(tensors, path)
    model = made_for(config_of(directory), Ranks(), kept=True)
    with pytest.raises(InvalidRequest, match=f"{name} has values that are not finite"):
        staging.stage(broken, model, model.config)


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(1, 2)], ids=str)
def test_an_update_of_which_one_tensor_is_refused_changes_nothing(ranks, directories, tmp_path):
    directory, module = directories(CASES["gptq-128"][0])[0], "model.layers.1.mlp.up_proj"
    model, changed = loaded(directory, ranks), shutil.copytree(directory, tmp_path / "m")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tensors = load_file(changed / "model.safetensors")
    added = {name: tensor + 1 for name, tensor in tensors.items() if tensor.is_floating_point()}
    files.change_tensors(changed, **added, **{f"{module}.qzeros": tensors[f"{module}.qzeros"] - 1})
    staged = staging.stage(changed, model, model.config)
    with pytest.raises(InvalidRequest, match=f"the update: {module}.weight cannot stay quantized: it has zero points"):
        staging.apply(staged, model)
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8)), key


@pytest.mark.parametrize("name", CASES)
def test_plain_tensors_of_an_update_are_quantized(name, directories):
    directory, exact = directories(CASES[name][0])
    model = loaded(directory)
    before = values_of(model)
    staging.apply(staging.stage(exact, model, model.config), model)
    for key, tensor in values_of(model).items():
        if is_quantized(model, key):
            assert (tensor - before[key]).norm() / before[key].norm() < 0.1, key
        else:
            assert torch.equal(tensor, before[key])


@pytest.mark.parametrize("ranks", [Ranks(), Ranks(0, 2), Ranks(1, 2), Ranks(0, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_size_of_the_weights_is_that_of_their_buffers(name, ranks, directories):
    case, _ = CASES[name]
    model = made_for(config_of(directories(case)[0]), ranks, kept=True)
    taken = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    found = weight_bytes(model.config, ranks, model.layer_range, FLOAT32, "checkpoint")
    if case.sizes:  # routers are estimated
        assert found == pytest.approx(taken, rel=0.01)
    else:
        assert found == taken


def test_zero_points_are_refused_if_the_settings_say_that_there_are_none(directories):
    directory, _ = directories(Case(files.gptq(32), gptq(32)))
    with pytest.raises(InvalidRequest, match=r"cannot stay quantized: it has zero points, .*; use quantization=none"):
        loaded(directory)


def test_layers_that_are_not_quantized_stay_in_dtype(checkpoint, tmp_path):
    settings = compressed("pack-quantized", INT4, ignore=["lm_head", r"re:.*layers\.1\..*"])
    chosen = files.re.compile(r".*\.layers\.0\..*_proj\.weight$")
    source = checkpoint("llama", **SIZES)
    directory, exact = files.write_quantized(source, tmp_path / "m", files.pack_quantized(32), settings, chosen=chosen)
    assert [each.kept for each in forms_of(directory)] == [[WeightForm("grouped", 4, 32, False)], []]
    torch.testing.assert_close(logits_of(loaded(directory)), logits_of(loaded(exact, kept=False)), rtol=0, atol=1e-4)


def test_matrices_that_are_not_quantized_stay_in_dtype(checkpoint, tmp_path):
    settings = compressed("pack-quantized", INT4, ignore=["lm_head", "re:.*down_proj"])
    chosen = files.re.compile(r".*(self_attn|gate|up).*_proj\.weight$")
    source = checkpoint("llama", **SIZES)
    directory, exact = files.write_quantized(source, tmp_path / "m", files.pack_quantized(32), settings, chosen=chosen)
    [form] = set(forms_of(directory))
    assert (form.forms.down, form.reason) == (IN_DTYPE, "")
    assert form.kept == [WeightForm("grouped", 4, 32, False)]
    model = loaded(directory)
    assert not is_quantized(model, "model.layers.0.mlp.down_proj.weight")
    torch.testing.assert_close(logits_of(model), logits_of(loaded(exact, kept=False)), rtol=0, atol=1e-4)


def test_plain_weights_that_the_settings_call_quantized_are_quantized_with_a_line_in_the_log(directories, tmp_path):
    directory, exact = directories(CASES["gptq-32"][0])
    changed, modules = shutil.copytree(directory, tmp_path / "m"), [f"model.layers.{each}.mlp.up_proj" for each in "01"]
    plain = {f"{module}.weight": load_file(exact / "model.safetensors")[f"{module}.weight"] for module in modules}
    parts = {f"{module}.{part}": None for module in modules for part in ("qweight", "qzeros", "scales", "g_idx")}
    files.change_tensors(changed, **parts | plain)
    with capture_logs() as logs:
        model = loaded(changed)
    [line] = logs
    assert (line["log_level"], line["count"], line["modules"]) == ("warning", 2, ", ".join(modules))
    assert all(is_quantized(model, f"{module}.weight") for module in modules)
    with capture_logs() as logs:  # on CPUs they stay in dtype
        loaded(changed, kept=False)
        loaded(directory)
    assert not logs


def test_a_tied_head_that_a_flag_quantizes_is_not_in_the_log(checkpoint, tmp_path):
    source = checkpoint("qwen2", **SIZES | {"tie_word_embeddings": True})
    directory, _ = files.write_quantized(source, tmp_path / "m", CASES["fp8-tensor"][0].store, FP8)
    config = config_of(directory)
    assert config.tied_embeddings
    model = DecoderModel(config, torch.bfloat16, CPU, TorchKernels(), make_linear(config, torch.bfloat16, CPU, "fp8"))
    with capture_logs() as logs:
        weights.load(directory, model.targets(), model.config)
    assert not logs


def test_a_model_without_settings_has_no_scheme(checkpoint):
    config = config_of(checkpoint("llama", **SIZES))
    assert layer_forms(config, Ranks(), range(2)) == [LayerForm()] * 2


@st.composite
def quantized_weights(draw) -> QuantizedWeight:
    """Return weights with blocks of any size. The last block of each dimension may be smaller."""
    rows, columns = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    block = draw(st.sampled_from([(ALL, ALL), (1, ALL)]) | st.tuples(st.integers(1, 8), st.integers(1, 8)))
    row_size, column_size = block[0] or rows, block[1] or columns
    shape = -(-rows // row_size), -(-columns // column_size)
    random = np.random.default_rng(draw(st.integers(0, 99)))
    is_float = draw(st.booleans())
    scheme = Scheme("plain", "float" if is_float else "int", 8, block)
    codes = torch.from_numpy(random.integers(-100, 100, (rows, columns)))
    scales = torch.from_numpy(random.uniform(0.1, 1, shape)).float()
    zeros = torch.from_numpy(random.integers(-8, 8, shape)) if draw(st.booleans()) and not is_float else None
    return QuantizedWeight(scheme, codes.to(FP8_DTYPE if is_float else torch.int8), scales, zeros, None)


@given(weight=quantized_weights(), dimension=st.integers(0, 1), data=st.data())
def test_a_share_has_the_values_of_the_whole_or_is_refused(weight, dimension, data):
    whole = weight.codes.shape[dimension]
    start = data.draw(st.integers(0, whole - 1))
    size = data.draw(st.integers(1, whole - start))
    block = weight.scheme.block[dimension] or 1
    block = 1 if weight.scales.shape[dimension] == 1 else block
    if start % block or ((start + size) % block and start + size != whole):
        with pytest.raises(ValueError, match="are not whole blocks of"):
            weight.narrow(dimension, start, size)
        return
    expected = weight.dequantized().narrow(dimension, start, size)
    assert torch.equal(weight.narrow(dimension, start, size).dequantized(), expected)


def test_columns_that_are_not_neighbours_are_not_divided():
    scheme = Scheme("gptq", "int", 4, (1, 2), ordered=True, act_order=True)
    codes, scales = torch.ones(2, 4, dtype=torch.uint8), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight = QuantizedWeight(scheme, codes, scales, None, torch.tensor([0, 1, 0, 1]))
    assert weight.narrow(0, 1, 1).dequantized().tolist() == [[3, 4, 3, 4]]
    with pytest.raises(ValueError, match="the columns cannot be divided"):
        weight.narrow(1, 0, 2)


def test_targets_keep_only_the_scheme_of_their_layer(directories):
    model = loaded(directories(CASES["gptq-32"][0])[0])
    target, embedding = (model.targets()[f"model.{name}.weight"] for name in ("layers.0.mlp.up_proj", "embed_tokens"))
    scheme = Scheme("gptq", "int", 4, (1, 32), zeros=True)
    assert keeps(target, scheme)
    assert not keeps(embedding, scheme)
    for other in ({"bits": 8}, {"block": (1, 16)}, {"kind": "float"}, {"act_order": True}):
        assert not keeps(target, replace(scheme, **other))


def test_integers_of_8_bits_take_those_of_4_bits_from_gguf_files_alone():
    linear = GroupedLinear(64, 32, bits=8, group=32)
    target = linear.targets("m")["m.weight"]
    scheme = Scheme("gptq", "int", 4, (1, 32), zeros=True, symmetric=True)
    assert not target.keeps(scheme)
    assert target.keeps(SCHEMES["Q4_0"])
