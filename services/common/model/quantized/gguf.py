"""The schemes by which the blocks of a GGUF file quantize weights."""

from services.common.model.gguf_file import BLOCK_TYPES, GgufFile
from services.common.model.gguf_names import tensor_sources
from services.common.model.quantized.patterns import ExactNames
from services.common.model.quantized.scheme import Layout, Quantization, Scheme, SchemeRule

GROUP = 32  # values that share a scale


def _integers(layout: Layout, name: str, bits: int, *, offsets: bool = False) -> Scheme:
    return Scheme(layout, "int", bits, (1, GROUP), zeros=offsets, name=name)


_INTEGERS = (
    _integers("gguf", "Q4_0", 4),
    _integers("gguf", "Q4_1", 4, offsets=True),
    _integers("gguf", "Q5_0", 8),
    _integers("gguf", "Q5_1", 8, offsets=True),
    _integers("gguf", "Q8_0", 8),
    _integers("gguf_k", "Q4_K", 4, offsets=True),
    _integers("gguf_k", "Q5_K", 8, offsets=True),
)
# By the type of a tensor. Integers of 5 bits are stored in 8. Types without blocks have no scheme.
SCHEMES = {
    each.name: Scheme("gguf", "other", 0, None, name=each.name) for each in BLOCK_TYPES.values() if each.elements > 1
} | {each.name: each for each in _INTEGERS}


def gguf_quantization(file: GgufFile) -> Quantization | None:
    """Return how the weights of ``file`` are quantized, or None if none of them are. Raises ``InvalidRequest``."""
    modules: dict[str, list[str]] = {}
    for name, source in tensor_sources(file).items():
        if name.endswith(".weight") and source.tensor.type.name in SCHEMES:
            modules.setdefault(source.tensor.type.name, []).append(name.removesuffix(".weight"))
    rules = tuple(SchemeRule((ExactNames(names),), SCHEMES[kind]) for kind, names in modules.items())
    return Quantization("gguf", rules) if rules else None
