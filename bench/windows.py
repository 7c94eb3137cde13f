"""The sizes and times of a worker's steps, by windows of several steps."""

from time import perf_counter
from typing import Any

from bench.gpus import EnergyMeter, Gpus
from bench.step_sizes import StepSizes
from services.worker.step.output import StepOutput

_NS_PER_MS = 1e6
HEADINGS = "  step    rows  chunk tok   ms/step   device ms   idle   prepare ms   tokens/s"


class Windows:
    """A collector of results in order. It prints a line at the end of each window."""

    def __init__(self, size: int, gpus: Gpus | None = None) -> None:
        """``size`` in steps. ``gpus`` measure the energy; None = it is not measured."""
        self._gpus = gpus
        self.figures: list[dict[str, float]] = []
        self._size = size
        self._steps: list[tuple[StepSizes, StepOutput]] = []
        self._begin()

    def add(self, sizes: StepSizes, output: StepOutput) -> None:
        """Add a completed step."""
        self._steps.append((sizes, output))
        if len(self._steps) == self._size:
            self.cut()

    def cut(self) -> None:
        """End the current window early, unless it is empty, and begin the next one."""
        if self._steps:
            self._close(perf_counter() - self._started)
        self._begin()

    def forget(self) -> None:
        """Discard the steps of the current window, and begin it again."""
        self._begin()

    def total(self) -> dict[str, Any]:
        """Return the figures over all windows."""
        steps, seconds, sampled = (sum(each[key] for each in self.figures) for key in ("steps", "seconds", "sampled"))
        found: dict[str, Any] = {"steps": steps, "seconds": round(seconds, 3)}
        if steps:
            found |= {"ms_per_step": round(1000 * seconds / steps, 3), "tokens_per_second": round(sampled / seconds)}
        if sampled and all("joules_per_token" in each for each in self.figures):
            joules = sum(each["joules_per_token"] * each["sampled"] for each in self.figures)
            found["joules_per_token"] = round(joules / sampled, 6)
        return found | {"windows": [{key: round(value, 6) for key, value in each.items()} for each in self.figures]}

    def _begin(self) -> None:
        self._energy = EnergyMeter(self._gpus)  # reads the driver, which is no part of the window's time
        self._steps, self._started = [], perf_counter()

    def _close(self, seconds: float) -> None:
        count, timings = len(self._steps), [output.timing for _, output in self._steps]
        device, idle, prepare = (
            sum(getattr(each, name) for each in timings) / _NS_PER_MS for name in ("device", "idle", "prepare")
        )
        figures = {
            "last_step": self._steps[-1][1].step,
            "steps": count,
            "seconds": seconds,
            "rows": sum(sizes.rows for sizes, _ in self._steps) / count,
            "chunk_tokens": sum(sizes.chunk_tokens for sizes, _ in self._steps) / count,
            "sampled": sum(sizes.samples for sizes, _ in self._steps),
            "ms_per_step": 1000 * seconds / count,
            "device_ms": device / count,  # 0 on cpu
            "idle_share": idle / (device + idle) if device else 0.0,
            "prepare_ms": prepare / count,
        } | self._energy.per_token(sum(sizes.samples for sizes, _ in self._steps))
        self.figures.append(figures)
        shown = "{last_step:6.0f} {rows:7.0f} {chunk_tokens:10.0f} {ms_per_step:9.3f} {device_ms:11.3f}"
        shown += " {idle_share:6.1%} {prepare_ms:12.3f} "
        print(shown.format(**figures), f"{figures['sampled'] / seconds:9,.0f}", flush=True)
