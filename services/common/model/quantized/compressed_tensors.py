"""Reads the ``quantization_config`` of compressed-tensors, which llm-compressor writes, as untrusted data."""

import reprlib
from collections.abc import Iterator

from services.common.model.json_object import JsonObject
from services.common.model.quantized.patterns import (
    MOST_NAMES,
    MOST_PATTERNS,
    AnyName,
    ExactNames,
    NamePattern,
    RegularExpression,
    check_count,
)
from services.common.model.quantized.scheme import (
    ALL,
    LARGEST_BLOCK,
    Scheme,
    SchemeRule,
    is_empty,
    refuse_others,
    refused,
)

_LINEAR = "Linear"  # the class of all modules that can be quantized here
_EXPRESSION = "re:"
_MIXED = "mixed-precision"
# Formats by the kind of their values.
_FORMATS = {
    "float-quantized": ("float",),
    "int-quantized": ("int",),
    "naive-quantized": ("float", "int"),
    "pack-quantized": ("int",),
}
_KEYS = {
    *("config_groups", "format", "global_compression_ratio", "ignore", "kv_cache_scheme", "quant_method"),
    *("quantization_status", "run_compressed", "sparsity_config", "version"),
}
_GROUP_KEYS = {"format", "input_activations", "output_activations", "targets", "weights"}
_WEIGHT_KEYS = {
    *("actorder", "block_structure", "dynamic", "group_size", "num_bits", "observer", "observer_kwargs"),
    *("scale_dtype", "strategy", "symmetric", "type", "zp_dtype"),
}


def read_compressed_tensors(given: JsonObject) -> Iterator[SchemeRule]:
    """Yield the rules of ``quantization_config``. Raises ``InvalidRequest``, which names the key and its value."""
    refuse_others(given, _KEYS)
    if not is_empty(given.values.get("kv_cache_scheme")):
        raise refused("kv_cache_scheme", reprlib.repr(given.values["kv_cache_scheme"]), "null")
    sparsity = given.object("sparsity_config").text("format", "dense")
    if sparsity != "dense":
        raise refused("sparsity_config.format", reprlib.repr(sparsity), "'dense'")
    if given.text("quantization_status", "compressed") != "compressed":
        raise refused("quantization_status", reprlib.repr(given.values["quantization_status"]), "'compressed'")
    yield SchemeRule(_patterns(given, "ignore", given.texts("ignore") or []), None)
    groups = given.object("config_groups")
    if not groups.values:
        raise refused("config_groups", reprlib.repr(given.values.get("config_groups")), "at least one group")
    check_count("config_groups", len(groups.values), MOST_PATTERNS)
    rules = [_read_group(groups, name, given.text("format")) for name in groups.values]
    # The name of a module counts before its class.
    yield from (rule for rule in rules if not _is_class(rule))
    yield from (rule for rule in rules if _is_class(rule))


def _is_class(rule: SchemeRule) -> bool:
    return any(isinstance(pattern, AnyName) for pattern in rule.patterns)


def _read_group(groups: JsonObject, name: str, whole_format: str) -> SchemeRule:
    path = f"config_groups.{name[:80]}"
    if not isinstance(groups.values[name], dict):  # a list of targets of a named scheme
        raise refused(path, reprlib.repr(groups.values[name]), "an object with weights and targets")
    group = groups.object(name)
    refuse_others(group, _GROUP_KEYS, f"{path}.")
    if not is_empty(group.values.get("output_activations")):
        raise refused(f"{path}.output_activations", reprlib.repr(group.values["output_activations"]), "null")
    activations = group.object("input_activations")
    bits = activations.integer("num_bits", 8, most=32)
    if bits not in (8, 16):  # products are in ``dtype``; with fewer bits the weights are made for other results
        raise refused(f"{path}.input_activations.num_bits", str(bits), "8")
    kept = group.text("format") or whole_format
    if kept not in _FORMATS:
        key = f"{path}.format" if group.text("format") or whole_format == _MIXED else "format"
        raise refused(key, reprlib.repr(kept), f"one of {', '.join(_FORMATS)}")
    patterns = _patterns(group, f"{path}.targets", group.texts("targets") or [])
    return SchemeRule(patterns, _read_weights(group.object("weights"), f"{path}.weights", kept))


def _read_weights(given: JsonObject, path: str, kept: str) -> Scheme:
    refuse_others(given, _WEIGHT_KEYS, f"{path}.")
    kind, bits = given.text("type", "int"), given.integer("num_bits", 8, most=32)
    packed = kept == "pack-quantized"
    if kind not in _FORMATS[kept]:
        raise refused(f"{path}.type", reprlib.repr(kind), f"{' or '.join(_FORMATS[kept])} for {kept}")
    if bits not in ((4, 8) if packed else (8,)):
        raise refused(f"{path}.num_bits", str(bits), f"{'4 or 8' if packed else '8'} for {kept}")
    symmetric = given.boolean("symmetric", True)
    if not symmetric and kind == "float":
        raise refused(f"{path}.symmetric", "false", "true for values of type float")
    if not is_empty(given.values.get("dynamic")):
        raise refused(f"{path}.dynamic", reprlib.repr(given.values["dynamic"]), "false")
    order = given.values.get("actorder")
    if order not in (None, False, "weight", "static", "group", "dynamic"):
        raise refused(f"{path}.actorder", reprlib.repr(order), "null, 'weight', 'static', 'group' or 'dynamic'")
    return Scheme(
        "packed" if packed else "plain",
        "float" if kind == "float" else "int",
        bits,
        _read_block(given, path),
        zeros=not symmetric,
        ordered=order in ("group", "dynamic"),
        act_order=order in ("group", "dynamic"),
    )


def _read_block(given: JsonObject, path: str) -> tuple[int, int]:
    """Return rows and columns that share a scale."""
    size = given.integer_or_none("group_size", least=-1, most=LARGEST_BLOCK)
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = given.text("strategy", default)
    if strategy == "group":
        if size is None or size < 1:
            raise refused(f"{path}.group_size", str(size), f"an integer from 1 to {LARGEST_BLOCK:,}")
        return 1, size
    if strategy == "block":
        sizes = given.numbers("block_structure", 2, least=1, most=LARGEST_BLOCK) or ()
        if len(sizes) != 2 or any(type(each) is not int for each in sizes):
            raise given.wrong("block_structure", f"2 integers from 1 to {LARGEST_BLOCK:,}")
        return int(sizes[0]), int(sizes[1])
    if strategy not in ("tensor", "channel"):
        raise refused(f"{path}.strategy", reprlib.repr(strategy), "'tensor', 'channel', 'group' or 'block'")
    return (ALL, ALL) if strategy == "tensor" else (1, ALL)


def _patterns(given: JsonObject, key: str, texts: list[str]) -> tuple[NamePattern, ...]:
    """Return the patterns of names, expressions that begin with ``re:``, and the class ``Linear``."""
    expressions = [text.removeprefix(_EXPRESSION) for text in texts if text.startswith(_EXPRESSION)]
    check_count(key, len(texts), MOST_NAMES)
    check_count(key, len(expressions), MOST_PATTERNS)
    names = ExactNames(text for text in texts if not text.startswith(_EXPRESSION))
    patterns: list[NamePattern] = [names, *(RegularExpression(key, text) for text in expressions)]
    return (*patterns, AnyName()) if _LINEAR in texts else tuple(patterns)
