"""Plots a load as a PNG file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.cli.bench.exchange import Reply
from services.cli.bench.figures import output_rate

_BINS = 100


def plot(replies: Sequence[Reply], title: str, target: Path, *, streamed: bool) -> None:
    """Plot throughput and running requests over time, and the cumulative distributions of times, to ``target``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    good = [reply for reply in replies if not reply.error]
    figure, (rate, running, times) = pyplot.subplots(3, 1, figsize=(8, 8), layout="constrained")
    figure.suptitle(title)
    rate.plot(*output_rate(replies, _BINS, streamed=streamed))
    rate.set(xlabel="seconds", ylabel="output tokens/s", ylim=(0, None))

    start = min((reply.sent_at for reply in replies), default=0.0)
    sent = np.sort([reply.sent_at - start for reply in replies])
    ended = np.sort([reply.ended_at - start for reply in replies])
    moments = np.sort(np.concatenate([sent, ended]))
    at_once = np.searchsorted(sent, moments, "right") - np.searchsorted(ended, moments, "right")
    running.step(moments, at_once, where="post")
    running.set(xlabel="seconds", ylabel="requests at once", ylim=(0, None))

    kinds = {"end to end": [1000 * (reply.ended_at - reply.sent_at) for reply in good]}
    if streamed:
        kinds = {
            "first token": [1000 * (reply.first_at - reply.sent_at) for reply in good],
            "per output token": [reply.per_token_ms for reply in good if reply.completion_tokens > 1],
            **kinds,
        }
    for name, values in kinds.items():
        times.plot(np.sort(values), np.arange(1, len(values) + 1) / max(len(values), 1), label=name)
    times.set(xscale="log", xlabel="milliseconds", ylabel="share of requests", ylim=(0, 1))
    times.legend()
    for axes in (rate, running, times):
        axes.grid(alpha=0.3)
    figure.savefig(target, dpi=120)
    pyplot.close(figure)
