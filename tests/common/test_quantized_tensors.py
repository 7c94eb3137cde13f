"""Tensors that store quantized weights, in files that an author could write to harm their reader."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidRequest
from services.common.model.broken_file import BrokenFile
from services.common.model.checkpoint_files import StoredTensor
from services.common.model.quantized.checkpoint import read_checkpoint
from services.common.model.quantized.scheme import Quantization
from services.common.model.quantized.settings import read_quantization
from services.common.model.quantized.tensors import quantized_tensors
from tests.common.test_quantized_settings import AWQ, FLOAT, FP8, GPTQ, INT4, MXFP4, compressed

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"
EXPERTS = "model.layers.0.mlp.experts.down_proj"
Parts = dict[str, tuple[str, tuple[int, ...]]]


def settings_of(name: str) -> Quantization:
    settings = {
        **{"fp8": FP8, "rows": FP8 | {"weight_block_size": None}, "gptq": GPTQ, "awq": AWQ, "mxfp4": MXFP4},
        "packed": compressed(INT4 | {"symmetric": False}),
        "order": compressed(INT4 | {"actorder": "group"}),
        "int8": compressed(INT4 | {"num_bits": 8, "strategy": "channel", "group_size": None}, format="int-quantized"),
        "float": compressed(FLOAT, format="float-quantized"),
    }[name]
    found = read_quantization({"quantization_config": settings})
    assert found is not None
    return found


# A weight of 192 rows and 256 columns.
STORED: dict[str, Parts] = {
    "fp8": {".weight": ("F8_E4M3", (192, 256)), ".weight_scale_inv": ("F32", (2, 2))},
    "rows": {".weight": ("F8_E4M3", (192, 256)), ".weight_scale": ("BF16", (192, 1)), ".input_scale": ("F32", ())},
    "gptq": {
        **{".qweight": ("I32", (32, 192)), ".qzeros": ("I32", (2, 24)), ".scales": ("F16", (2, 192))},
        ".g_idx": ("I32", (256,)),
    },
    "awq": {".qweight": ("I32", (256, 24)), ".qzeros": ("I32", (2, 24)), ".scales": ("F16", (2, 192))},
    "packed": {
        **{".weight_packed": ("I32", (192, 32)), ".weight_scale": ("BF16", (192, 2)), ".weight_shape": ("I64", (2,))},
        ".weight_zero_point": ("I32", (24, 2)),
    },
    "order": {
        **{".weight_packed": ("I32", (192, 32)), ".weight_scale": ("BF16", (192, 2)), ".weight_shape": ("I64", (2,))},
        ".weight_g_idx": ("I32", (256,)),
    },
    "int8": {".weight": ("I8", (192, 256)), ".weight_scale": ("F32", (192, 1))},
    "float": {".weight": ("F8_E4M3", (192, 256)), ".weight_scale": ("F32", (192, 1))},
    "mxfp4": {"_blocks": ("U8", (4, 192, 8, 16)), "_scales": ("U8", (4, 192, 8))},
}


def tensors(name: str, **changes: tuple[str, tuple[int, ...]] | None) -> dict[str, StoredTensor]:
    """Return the stored tensors of a case. Changes are by the end of a name, with ``_`` for the dot before it."""
    parts: dict[str, tuple[str, tuple[int, ...]] | None] = dict(STORED[name])
    for end, change in changes.items():
        parts[f".{end}" if name != "mxfp4" else f"_{end}"] = change
    prefix = EXPERTS if name == "mxfp4" else MODULE
    return {f"{prefix}{end}": StoredTensor(*each) for end, each in parts.items() if each is not None}


@pytest.mark.parametrize("name", STORED)
def test_parts_give_the_shape_of_the_weight(name):
    stored = tensors(name) | {"model.norm.weight": StoredTensor("BF16", (256,))}
    found, used = quantized_tensors(settings_of(name), stored)
    [(weight, tensor)] = found.items()
    expected = (4, 256, 192) if name == "mxfp4" else (192, 256)
    assert (weight, tensor.shape) == (EXPERTS if name == "mxfp4" else WEIGHT, expected)
    assert used == stored.keys() - {"model.norm.weight"}


REFUSED = [
    ("fp8", {"weight_scale_inv": None}, "weight_scale is missing"),
    ("fp8", {"weight_scale_inv": ("F32", (2, 3))}, r"weight_scale_inv has shape \[2, 3\]; expected \[2, 2\] for FP8"),
    ("fp8", {"weight_scale_inv": ("F32", ())}, r"has shape \[\]"),
    ("fp8", {"weight_scale_inv": ("I32", (2, 2))}, "has dtype I32; expected BF16 or F16"),
    ("fp8", {"weight_scale": ("F32", (2, 2))}, "weight_scale_inv is stored too"),
    ("fp8", {"weight": ("BF16", (192, 256))}, "up_proj.weight has dtype BF16; expected F8_E4M3"),
    ("fp8", {"weight": ("I8", (192, 256))}, "has dtype I8; expected F8_E4M3"),
    ("fp8", {"weight": ("F8_E5M2", (192, 256))}, "has dtype F8_E5M2; expected F8_E4M3"),
    ("fp8", {"weight": ("F8_E4M3", (192, 256, 1))}, "expected two dimensions"),
    ("fp8", {"weight": ("F8_E4M3", (0, 256))}, "expected two dimensions"),
    ("fp8", {"weight_zero_point": ("I8", (2, 2))}, "weight_zero_point has no meaning"),
    ("rows", {"weight_scale": ("F32", (2, 2))}, "without weight_block_size"),
    ("rows", {"qweight": ("I32", (32, 192))}, "does not fit quant_method='fp8'"),
    ("gptq", {"qzeros": None}, "qzeros is missing"),
    ("gptq", {"scales": None}, "scales is missing"),
    ("gptq", {"scales": ("F16", (3, 192))}, r"scales has shape \[3, 192\]; expected \[2, 192\]"),
    ("gptq", {"qzeros": ("I32", (2, 25))}, r"qzeros has shape \[2, 25\]; expected \[2, 24\]"),
    ("gptq", {"g_idx": ("I32", (255,))}, r"g_idx has shape \[255\]; expected \[256\]"),
    ("gptq", {"g_idx": ("F32", (256,))}, "g_idx has dtype F32"),
    ("gptq", {"qweight": ("I64", (32, 192))}, "qweight has dtype I64; expected I32"),
    ("gptq", {"qweight": ("I32", (1 << 40, 1 << 40))}, "has shape"),
    ("gptq", {"weight": ("F16", (192, 256))}, "up_proj.weight is stored too"),
    ("gptq", {"qweight": None, "weight": ("I8", (192, 256))}, "does not fit quant_method='gptq'"),
    ("awq", {"qweight": ("I32", (256, 23))}, "has shape"),
    ("awq", {"scales": ("I16", (2, 192))}, "scales has dtype I16"),
    ("packed", {"weight_zero_point": None}, "weight_zero_point is missing"),
    ("packed", {"weight_zero_point": ("I8", (192, 2))}, "weight_zero_point has dtype I8; expected I32"),
    ("packed", {"weight_shape": None}, "weight_shape is missing"),
    ("packed", {"weight_shape": ("I64", (3,))}, r"weight_shape has shape \[3\]"),
    ("packed", {"weight_g_idx": ("I32", (256,))}, "weight_g_idx has no meaning"),
    ("order", {"weight_g_idx": ("I32", (1,))}, r"weight_g_idx has shape \[1\]"),
    ("int8", {"weight_scale": None}, "weight_scale is missing"),
    ("int8", {"weight": ("U8", (192, 256))}, "has dtype U8; expected I8"),
    ("float", {"weight_scale": ("F32", (191, 1))}, r"has shape \[191, 1\]"),
    ("mxfp4", {"scales": None}, "down_proj_scales is missing"),
    ("mxfp4", {"scales": ("U8", (4, 192, 7))}, r"has shape \[4, 192, 7\]"),
    ("mxfp4", {"blocks": ("U8", (4, 192, 8, 17))}, r"expected \[experts, outputs, inputs / 32, 16\]"),
    ("mxfp4", {"blocks": ("I8", (4, 192, 8, 16))}, "has dtype I8; expected U8"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_parts_that_do_not_fit_are_named(name, changes, message):
    with pytest.raises(InvalidRequest, match=message) as refused:
        quantized_tensors(settings_of(name), tensors(name, **changes))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("name", ["gptq", "fp8", "packed"])
def test_a_module_that_the_settings_leave_out_must_not_be_quantized(name):
    stored = {key.replace(MODULE, "lm_head"): each for key, each in tensors(name).items()}
    settings = FP8 | {"modules_to_not_convert": ["lm_head"]}
    found = read_quantization({"quantization_config": settings}) if name == "fp8" else settings_of(name)
    assert found is not None
    with pytest.raises(InvalidRequest, match=r"lm_head\.\w+ is quantized, but quantization_config .* lm_head is not"):
        quantized_tensors(found, stored)


DTYPES = st.sampled_from(["F8_E4M3", "I8", "U8", "I32", "I64", "F16", "BF16", "F32"])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 8, 24, 32, 192, 256, 1 << 62]), max_size=5).map(tuple)


@given(st.sampled_from(sorted(STORED)), st.data())
def test_any_parts_are_read_or_refused(name, data):
    stored = tensors(name)
    for key in data.draw(st.lists(st.sampled_from(sorted(stored)), min_size=1, max_size=3)):
        change = data.draw(st.none() | st.tuples(DTYPES, SHAPES))
        stored.pop(key, None)
        if change is not None:
            stored[key] = StoredTensor(*change)
    try:
        found, used = quantized_tensors(settings_of(name), stored)
    except InvalidRequest as refused:
        assert refused.message  # noqa: PT017 (either is right)
        return
    assert used <= stored.keys()
    for tensor in found.values():  # a weight has no more values than two for each byte that stores it
        assert math.prod(tensor.shape) <= 2 * sum(stored[part].nbytes for part in tensor.parts.values())


def write(directory: Path, stored: dict[str, StoredTensor], *, cut: int = 0) -> None:
    """Write a file of zeros with ``stored``, without its last ``cut`` bytes, and settings of GPTQ."""
    header, end = {}, 0
    for name, each in stored.items():
        header[name] = {"dtype": each.dtype, "shape": each.shape, "data_offsets": [end, end + each.nbytes]}
        end += each.nbytes
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end - cut))
    (directory / "config.json").write_text(json.dumps({"quantization_config": GPTQ}))


def test_a_file_has_weights_instead_of_their_parts(tmp_path):
    write(tmp_path, tensors("gptq") | {"model.norm.weight": StoredTensor("BF16", (256,))})
    [shard] = read_checkpoint(tmp_path)
    assert not isinstance(shard, BrokenFile)
    assert {name: each.shape for name, each in shard.tensors.items()} == {
        WEIGHT: (192, 256),
        "model.norm.weight": (256,),
    }
    assert shard.formats == ["INT4 in groups of 128", "BF16"]


def test_a_file_that_was_cut_off_is_broken(tmp_path):
    write(tmp_path, tensors("gptq"), cut=1)
    [shard] = read_checkpoint(tmp_path)
    assert isinstance(shard, BrokenFile)


def test_settings_are_refused_before_files_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(InvalidRequest, match="quant_method='hqq' is not supported"):
        list(read_checkpoint(tmp_path))
