"""Reads ``quantization_config`` of ``config.json`` as untrusted data."""

import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from services.common.model.json_object import JsonObject
from services.common.model.quantized.compressed_tensors import read_compressed_tensors
from services.common.model.quantized.patterns import (
    MOST_NAMES,
    MOST_PATTERNS,
    AnyName,
    PartialNames,
    RegularExpression,
    check_count,
)
from services.common.model.quantized.scheme import (
    LARGEST_BLOCK,
    Quantization,
    Scheme,
    SchemeRule,
    grouped,
    refuse_others,
    refused,
)

_KEY = "quantization_config"
_HEAD = "lm_head"
_SKIPPED = ("modules_to_not_convert", "ignored_layers")  # two names of one list
# Keys that say how a checkpoint was made or how a library runs it. The stored values do not depend on them.
_MAKING = {
    *("backend", "batch_size", "block_name_to_quantize", "cache_block_outputs", "damp_auto_increment", "damp_percent"),
    *("dataset", "dequantize", "disable_exllama", "do_fuse", "exllama_config", "fuse_max_seq_len", "max_input_length"),
    *("meta", "model_file_base_name", "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "mse"),
    *("modules_to_fuse", "pad_token_id", "parallel_packing", "quantizer", "static_groups", "tokenizer"),
    *("true_sequential", "use_cuda_fp16", "use_exllama", "quant_method", "method", "is_checkpoint_fp8_serialized"),
}
_GPTQ_FORMATS = ("gptq", "gptq_v2")


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how the weights are quantized, or None if ``config``, that of ``config.json``, says that they are not.

    Raises ``InvalidRequest``, which names the key and its value, if the scheme, or a part of it, is not supported.
    """
    given = JsonObject("config.json", config).object(_KEY)
    if not given.values:
        return None
    method = given.text("quant_method", "unknown")
    if method not in _METHODS:
        raise refused("quant_method", reprlib.repr(method), f"one of {', '.join(_METHODS)}")
    return Quantization(method, tuple(_METHODS[method](given)))


def _read_fp8(given: JsonObject) -> Iterator[SchemeRule]:
    refuse_others(
        given,
        _MAKING | {*_SKIPPED, "activation_scheme", "weight_block_size", "fmt", "scale_fmt", "expert_dtype"},
    )
    _choose(given, "activation_scheme", ("dynamic", "static"))  # products are in ``dtype`` either way
    _choose(given, "fmt", ("e4m3", "float8_e4m3fn"))
    _choose(given, "scale_fmt", ("float", "ue8m0"))
    _choose(given, "expert_dtype", ("fp8",))
    block = None
    if given.values.get("weight_block_size") is not None:
        sizes = given.numbers("weight_block_size", 2, least=1, most=LARGEST_BLOCK) or ()
        if any(type(size) is not int for size in sizes):
            raise given.wrong("weight_block_size", "2 integers")
        block = (int(sizes[0]), int(sizes[1]))
    yield from _skipped(given)
    yield SchemeRule((AnyName(),), Scheme("plain", "float", 8, block))


def _read_gptq(given: JsonObject) -> Iterator[SchemeRule]:
    inside = "modules_in_block_to_quantize"
    refuse_others(
        given,
        _MAKING
        | {*_SKIPPED, *("bits", "group_size", "desc_act", "sym", "checkpoint_format", "format", "pack_dtype"), inside}
        | {"is_marlin_format", "lm_head", "dynamic"},
    )
    _choose(given, "pack_dtype", ("int32",))
    if given.boolean("is_marlin_format"):
        raise refused("is_marlin_format", "true", "false")
    name = "checkpoint_format" if given.values.get("checkpoint_format") is not None else "format"
    layout = _choose(given, name, _GPTQ_FORMATS)
    scheme = Scheme("gptq_v2" if layout == "gptq_v2" else "gptq", "int", _bits(given, (4, 8)), None, zeros=True)
    # Zeros are stored with ``sym`` too, and a group of each column without ``desc_act``.
    scheme = replace(scheme, symmetric=given.boolean("sym"), ordered=True, act_order=given.boolean("desc_act"))
    yield from _integers(given, scheme, _inside(given, inside))


def _read_awq(given: JsonObject) -> Iterator[SchemeRule]:
    names = ("version", "checkpoint_format", "format")
    refuse_others(
        given,
        _MAKING | {*_SKIPPED, *names, "bits", "group_size", "zero_point", "sym", "desc_act", "lm_head", "dynamic"},
    )
    for name in names:
        if given.text(name, "gemm").lower() != "gemm":
            raise refused(name, reprlib.repr(given.values[name]), "'gemm'")
    for name, expected in (("zero_point", True), ("sym", False), ("desc_act", False)):
        if given.boolean(name, expected) is not expected:
            raise refused(name, str(not expected).lower(), str(expected).lower())
    yield from _integers(given, Scheme("awq", "int", _bits(given, (4,)), None, zeros=True))


def _read_mxfp4(given: JsonObject) -> Iterator[SchemeRule]:
    refuse_others(given, {*_MAKING, *_SKIPPED})
    yield from _skipped(given)
    yield SchemeRule((AnyName(),), Scheme("mxfp4", "float", 4, (1, 32)))


_METHODS: dict[str, Callable[[JsonObject], Iterator[SchemeRule]]] = {
    "fp8": _read_fp8,
    "compressed-tensors": read_compressed_tensors,
    "gptq": _read_gptq,
    "awq": _read_awq,
    "mxfp4": _read_mxfp4,
}


def _integers(given: JsonObject, scheme: Scheme, names: Collection[str] = ()) -> Iterator[SchemeRule]:
    """Yield the rules of GPTQ and AWQ. ``names`` are the only modules of a layer that are quantized; empty = all."""
    yield from _skipped(given)
    scheme = grouped(scheme, _group_size(given))
    head = given.boolean(_HEAD)
    if not head:
        yield SchemeRule((PartialNames([_HEAD]),), None)
    yield from _dynamic(given.object("dynamic"), scheme)
    named = PartialNames([*names, _HEAD]) if names else AnyName()
    yield SchemeRule((named,), scheme)


def _dynamic(given: JsonObject, scheme: Scheme) -> Iterator[SchemeRule]:
    """Yield the exceptions of GPTQModel: expressions of modules that are not quantized (``-:``) or otherwise."""
    check_count("dynamic", len(given.values), MOST_PATTERNS)
    for text in given.values:
        pattern = RegularExpression("dynamic", text.removeprefix("+:").removeprefix("-:"))
        if text.startswith("-:"):
            yield SchemeRule((pattern,), None)
            continue
        changes = given.object(text)
        if unknown := sorted(changes.values.keys() - {"bits", "group_size", "sym", "desc_act"} - _MAKING):
            raise refused(f"dynamic.{text[:80]}.{unknown[0][:80]}", _shown(changes, unknown[0]), "bits or group_size")
        bits = changes.integer("bits", scheme.bits, most=8)
        if bits != scheme.bits and (scheme.layout == "awq" or bits not in (4, 8)):
            raise refused(f"dynamic.{text[:80]}.bits", str(bits), str(scheme.bits))
        size = _group_size(changes) if "group_size" in changes.values else None
        symmetric = changes.boolean("sym", scheme.symmetric)
        act_order = changes.boolean("desc_act", scheme.act_order)
        changed = replace(scheme, bits=bits, symmetric=symmetric, act_order=act_order)
        yield SchemeRule((pattern,), changed if size is None else grouped(changed, size))


def _inside(given: JsonObject, name: str) -> list[str]:
    """Return the names in a list of lists of names, or [] if it is absent."""
    value = given.values.get(name)
    lists = value if isinstance(value, list) else [] if value is None else [value]
    names = [each for part in lists for each in (part if isinstance(part, list) else [part])]
    if any(type(each) is not str for each in names):
        raise given.wrong(name, "lists of names")
    check_count(name, len(names), MOST_NAMES)
    return names


def _skipped(given: JsonObject) -> Iterator[SchemeRule]:
    """Yield the rule for modules that are not quantized."""
    for key in _SKIPPED:
        names = given.texts(key) or []
        check_count(key, len(names), MOST_NAMES)
        yield SchemeRule((PartialNames(names),), None)


def _bits(given: JsonObject, supported: tuple[int, ...]) -> int:
    bits = given.integer("bits", most=32)
    if bits not in supported:
        raise refused("bits", str(bits), " or ".join(map(str, supported)))
    return bits


def _group_size(given: JsonObject) -> int:
    size = given.integer("group_size", least=-1, most=LARGEST_BLOCK)
    if size == 0:
        raise given.wrong("group_size", f"-1, or an integer from 1 to {LARGEST_BLOCK:,}")
    return size


def _choose(given: JsonObject, name: str, supported: tuple[str, ...]) -> str:
    """Return the text ``name``, or the first that is ``supported`` if it is absent."""
    value = given.text(name, supported[0])
    if value not in supported:
        raise refused(name, reprlib.repr(value), " or ".join(map(repr, supported)))
    return value


def _shown(given: JsonObject, name: str) -> str:
    return reprlib.repr(given.values[name])
