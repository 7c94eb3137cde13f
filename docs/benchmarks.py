"""Draws ``docs/benchmarks.png`` from the figures of ``docs/performance/gpu.md``: ``python docs/benchmarks.py``.

Each figure is written as it is there (``tests/docs/test_benchmarks.py``). This server ran without a tuning flag.
The original ran with the flags that its authors advise. Where others have a range, the better end is shown.
"""

from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

TARGET = Path(__file__).with_name("benchmarks.png")


class Bar(NamedTuple):
    """The figures of one server."""

    name: str
    figures: tuple[str, ...]
    colour: str


VLLM, ORIGINAL, OURS = "#b8bcc4", "#7b8494", "#2f6fb5"
SAMPLING = (
    Bar("vLLM 0.26.0", ("33,900",), VLLM),
    Bar("Tokasaurus 0.0.4", ("60,500",), ORIGINAL),
    Bar("this server", ("152,734",), OURS),
)
MIXED = (
    Bar("vLLM 0.26.0", ("51,900",), VLLM),
    Bar("Tokasaurus 0.0.4", ("63,500",), ORIGINAL),
    Bar("this server", ("85,145",), OURS),
)
STREAMS = ("1 stream", "8", "64")
LATENCY = (
    Bar("vLLM 0.26.0", ("1.36", "1.60", "2.01"), VLLM),
    Bar("Tokasaurus 0.0.4", ("2.12", "2.16", "2.64"), ORIGINAL),
    Bar("this server", ("0.809", "1.020", "1.323"), OURS),
)


def draw(target: Path) -> None:
    """Draw three panels, 1600 pixels wide and readable at half of that."""
    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (sampling, mixed, latency) = plt.subplots(1, 3, figsize=(10, 3.5), dpi=160, width_ratios=(3, 3, 5))
    _throughput(sampling, "Repeated sampling\n1,024 samples of each prompt", SAMPLING)
    _throughput(mixed, "Mixed workload\nthousands of requests at once", MIXED)
    _grouped(latency, "Latency\nms per output token, less is better", LATENCY)
    sampling.set_ylabel("output tokens per second")
    figure.text(
        0.5,
        0.012,
        "One NVIDIA H200, Llama-3.2-1B shape, bf16; this server without tuning flags; see docs/performance.md",
        ha="center",
        fontsize=9,
    )
    figure.tight_layout(rect=(0, 0.04, 1, 1), w_pad=1.5)
    figure.savefig(target, facecolor="white")
    plt.close(figure)


def value(figure: str) -> float:
    return float(figure.replace(",", ""))


def _throughput(axes: Axes, title: str, bars: tuple[Bar, ...]) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    for place, bar in enumerate(bars):
        [figure] = bar.figures
        axes.bar(place, value(figure), color=bar.colour, width=0.7)
        axes.text(place, value(figure), figure, ha="center", va="bottom", fontsize=10)
    axes.set_ylim(0, 1.12 * max(value(bar.figures[0]) for bar in bars))
    axes.set_xticks(range(len(bars)), [bar.name.replace(" ", "\n") for bar in bars], fontsize=9)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _grouped(axes: Axes, title: str, bars: tuple[Bar, ...]) -> None:
    axes.set_title(title, fontsize=11, loc="left")
    width = 0.8 / len(bars)
    for number, bar in enumerate(bars):
        places = [group + (number - (len(bars) - 1) / 2) * width for group in range(len(STREAMS))]
        axes.bar(places, [value(figure) for figure in bar.figures], width * 0.92, color=bar.colour, label=bar.name)
        for place, figure in zip(places, bar.figures, strict=True):
            axes.text(place, value(figure), f"{value(figure):.2f}", ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(STREAMS)), STREAMS)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_ylim(0, 3.4)
    axes.legend(
        fontsize=8.5, frameon=False, ncols=3, loc="upper center", columnspacing=1, handlelength=1, borderaxespad=0
    )


if __name__ == "__main__":
    draw(TARGET)
