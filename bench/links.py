"""Measure the exchange of activations between tensor-parallel ranks: ``python -m bench.links [tp_size=2]
[shape=llama-8b] [tokens=16,64,...] [device=cuda] [repeats=20] [graphs=F]``.

Each rank is a process, on its own GPU if there are GPUs. The products of a layer (qkv, output, gate and up, down) run
with every exchange strategy of the worker, and without an exchange. The difference is the cost of the links. ``head``
is the product of a rank's part of the vocabulary. A step takes one of the columns times the number of layers, and the
head. Norms, attention and activations are left out; a rank with a share of the rows also computes fewer norms.

On a GPU, each strategy is a CUDA graph, unless ``graphs=F``. Times are those of the slowest rank. The thresholds of the
worker follow from them: for sums through peer memory, for sharded rows, and for overlapping products
(``async_tp_threshold``). The last line is one JSON object.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Literal

from pydantic import Field

from bench.model import SHAPES, VOCAB_SIZE
from bench.server import free_port, report
from services.common.config import from_command_line
from services.common.flags import Bool, Config, Int, Ints

_TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_WARMUP = 3


class LinksConfig(Config):
    """The flags."""

    tp_size: Int = Field(2, ge=2, le=8, description="ranks, each a process")
    shape: Literal["llama-1b", "llama-8b", "llama-70b", "tiny"] = "llama-8b"
    tokens: Ints = Field(_TOKENS, min_length=1, description="sizes of steps in tokens")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    repeats: Int = Field(20, ge=1, description="layers in a measurement")
    graphs: Bool = Field(True, description="on a GPU, launch CUDA graphs; F: launch eagerly, as for steps with prompts")


def main() -> None:
    config = from_command_line(LinksConfig)
    port = free_port()
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    processes = [context.Process(target=_rank, args=(config, rank, port, results)) for rank in range(config.tp_size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a rank has failed; its reason is above")
    device, found = results.get()
    names = list(found[config.tokens[0]])
    print(f"{device}, tp_size={config.tp_size}, {config.shape}: microseconds of a layer's products")
    print(f"{'tokens':>8}" + "".join(f"{name:>18}" for name in names))
    for tokens, times in found.items():
        print(f"{tokens:>8}" + "".join(f"{times[name]:>18.1f}" for name in names))
    layers = SHAPES[config.shape]["num_hidden_layers"]
    report({"device": device, "tp_size": config.tp_size, "shape": config.shape, "layers": layers, "us": found})


def _rank(config: LinksConfig, rank: int, port: int, results: multiprocessing.SimpleQueue) -> None:
    """Run a rank. The entry point of its process."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # as in a worker
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(config.tp_size)))).split(",")
    if config.device != "cpu" and rank < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[rank]
    import torch

    from services.worker.described.ranks import Ranks
    from services.worker.parallel.group import RankGroup

    on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda:0" if on_gpu else "cpu")
    group = RankGroup(Ranks(tp_rank=rank, tp_size=config.tp_size), "127.0.0.1", port, device, {})
    done = threading.Event()  # a rank that leaves after this is not lost
    group.watch(lambda error: done.is_set() or os._exit(error.exit_status))
    layer = _Layer(config, device)
    found = {}
    with torch.inference_mode():
        for tokens in sorted(config.tokens, reverse=True):  # buffers grow only before graphs are captured
            found[tokens] = {
                name: _slowest(group, _timed(group, layer.once(exchange, tokens), config, device))
                for name, exchange in _exchanges(group, tokens)
            } | {"head": _slowest(group, _timed(group, layer.head_of(tokens), config, device))}
    group.wait_for_all()
    done.set()
    group.wait_for_all()
    if rank == 0:
        name = torch.cuda.get_device_name() if on_gpu else "cpu"
        results.put((name, dict(sorted(found.items()))))
    group.close()


def _exchanges(group, tokens: int) -> Iterable[tuple[str, object]]:
    """Yield the name and the object of every strategy that supports ``tokens`` tokens."""
    from services.worker.parallel.exchange import ALONE, AllReduce, Overlapped, PeerSum, SequenceSharded

    place = group.ranks.tp_rank, group.ranks.tp_size
    yield "alone", ALONE
    yield "all_reduce", AllReduce(group.ranks.tp_size)
    if group.shares_memory:
        yield "peer_sum", PeerSum(group.ranks.tp_size)
    if tokens % group.ranks.tp_size == 0:
        yield "sharded", SequenceSharded(*place)
        if group.shares_memory:
            yield "overlapped", Overlapped(*place)


class _Layer:
    """A rank's share of the products of a layer, and of the head."""

    def __init__(self, config: LinksConfig, device) -> None:
        import torch

        from services.worker.layers.linear import Linear

        shape, size = SHAPES[config.shape], config.tp_size
        hidden, inner = shape["hidden_size"], shape["intermediate_size"] // size
        heads = shape["num_attention_heads"] // size * shape["head_dim"]
        kv_heads = max(1, shape["num_key_value_heads"] // size) * shape["head_dim"]
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._device, self._hidden, self._heads, self._inner = device, hidden, heads, inner

        def linear(inputs: int, outputs: int) -> Linear:
            module = Linear(inputs, outputs).to(device, self._dtype)
            torch.nn.init.normal_(module.weight, std=inputs**-0.5)
            return module

        self._qkv, self._output = linear(hidden, heads + 2 * kv_heads), linear(heads, hidden)
        self._gate_up, self._down = linear(hidden, 2 * inner), linear(inner, hidden)
        self._head = linear(hidden, VOCAB_SIZE // size)

    def once(self, exchange, tokens: int) -> Callable[[], None]:
        """Return a function that runs the products of a layer."""
        import torch

        x = torch.randn(exchange.rows(tokens), self._hidden, device=self._device, dtype=self._dtype)

        def run() -> None:
            attended = exchange.column(x, self._qkv, tokens)[:, : self._heads]
            exchange.row(attended.contiguous(), self._output)
            gated = exchange.column(x, self._gate_up, tokens)[:, : self._inner]
            exchange.row(gated.contiguous(), self._down)

        return run

    def head_of(self, tokens: int) -> Callable[[], None]:
        """Return a function that computes the logits of all ``tokens``."""
        import torch

        x = torch.randn(tokens, self._hidden, device=self._device, dtype=self._dtype)
        return lambda: self._head(x)


def _timed(group, run: Callable[[], None], config: LinksConfig, device) -> float:
    """Return the mean microseconds of ``config.repeats`` runs."""
    import torch

    def repeat() -> None:
        for _ in range(config.repeats):
            run()

    for _ in range(_WARMUP):
        run()
    group.wait_for_all()
    if device.type == "cpu":
        began = time.perf_counter()
        repeat()
        return (time.perf_counter() - began) / config.repeats * 1e6
    replay = repeat
    if config.graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            repeat()
        replay = graph.replay
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    replay()
    torch.cuda.synchronize()
    group.wait_for_all()
    begin.record()
    replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / config.repeats * 1e3


def _slowest(group, value: float) -> float:
    """Return the largest ``value`` of all ranks."""
    return -group.least(-int(value * 1000)) / 1000


if __name__ == "__main__":
    main()
