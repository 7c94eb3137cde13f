"""A table of the kernels of a step by part of the model, which follows from their names and their neighbours."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

_SPANS, _PRODUCT = "spans", "product"  # their neighbours decide the part

# The first pattern that occurs in a kernel's name decides.
_NAMES = [
    (re.compile(pattern, re.IGNORECASE), part)
    for pattern, part in (
        (r"rotate_and_store", "store"),
        (r"^(copy|attend)_prefixes", "attention prefix"),
        (r"BatchPrefill|PrefillWithKV|PrefillWithPaged|MergeStates?Kernel|VariableLengthMerge|_attend", _SPANS),
        (r"^_?(batch_?)?decode|^_decode|^_merge|BatchDecode", "attention own"),
        (r"^_(route|count|place|products|sum)$", "experts"),
        (r"summari[sz]e|^_?pick|look_up|find_lowest|add_bias|count_tokens|penalise|gumbel", "sampling"),
        (r"topk|bitonic|radix|softmax|cub::", "sampling"),
        (r"gather_inputs|_scatter\b|_advance\b|scatter", "rest"),
        (r"silu|sigmoid|swiglu|^_gate", "activation"),
        (
            r"nvjet|gemm|gemv|cutlass|cublas|xmma|splitk|product_kernel|^(block_)?product|triton_mm|triton_tem_",
            _PRODUCT,
        ),
        (r"^grouped_(rows|tiles|sum|dequantize)", _PRODUCT),
        (r"rsqrt|rms_?norm|layer_norm|amax", "norms"),
        (r"memcpy|memset|copy|multi_tensor|indexSelect|index_select|gather", "copies"),
        (r"norm|reduce_kernel.*mean", "norms"),
    )
]


@dataclass
class KernelTable:
    """The time of one step on the device, by part."""

    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # ms
    counts: Counter = field(default_factory=Counter)  # launches by part
    names: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # ms by "part: kernel"

    def largest(self, count: int) -> list[tuple[str, float]]:
        """Return the ``count`` kernels that take most time, as ``(part: name, ms)``."""
        return sorted(self.names.items(), key=lambda item: -item[1])[:count]


def tabulate(kernels: Iterable[tuple[str, float]], *, grouped: bool) -> KernelTable:
    """Return the table of ``kernels``, names and milliseconds in order. ``grouped``: the step has Hydragen groups."""
    kernels = list(kernels)
    found = [_part(name) for name, _ in kernels]
    _tell_head(found, [name for name, _ in kernels])
    _tell_spans(found, grouped)
    table = KernelTable()
    for (name, ms), part in zip(kernels, found, strict=True):
        table.parts[part] += ms
        table.counts[part] += 1
        table.names[f"{part}: {name[:80]}"] += ms
    return table


def profile(run: Callable[[], None], *, grouped: bool) -> KernelTable:
    """Return the table of the kernels that ``run`` launches. ``run`` must wait for the device."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watching

    with watching(activities=[ProfilerActivity.CUDA]) as watched:
        run()
    events = [event for event in watched.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    return tabulate(((event.name, event.time_range.elapsed_us() / 1000) for event in events), grouped=grouped)


def _part(name: str) -> str:
    return next((part for pattern, part in _NAMES if pattern.search(name)), "rest")


def _tell_head(found: list[str], names: list[str]) -> None:
    """Find the vocabulary head: the product before sampling."""
    wanted = False
    for index in reversed(range(len(found))):
        if found[index] == _PRODUCT:
            found[index] = "vocabulary head" if wanted else "layer products"
            if "split" not in names[index].lower():  # the product itself ran before its reduction
                wanted = False
        elif found[index] == "sampling":
            wanted = True
        elif found[index] in ("activation", "store"):  # a layer: the product before it is not the head
            wanted = False


def _tell_spans(found: list[str], grouped: bool) -> None:
    """Classify attention: in every layer, prefixes run after storing, then own tokens, and then chunks."""
    behind = not grouped
    for index, part in enumerate(found):
        if part == "store":
            behind = not grouped
        elif part == "attention own":
            behind = True
        elif part == _SPANS:
            found[index] = "attention chunks" if behind else "attention prefix"
