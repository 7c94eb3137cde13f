"""How a deployment starts on a GPU: the size of its cache, and what it keeps for the next start."""

import re
import time
from pathlib import Path

import pytest
import torch

from bench.server import Server, serve
from tests.e2e.samples import generate_all, random_prompt, request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.timeout(600),  # two starts, and the first one compiles
]

PAGE_SIZE = 16
COMPILED_CODE = (".cubin", ".so")


async def answers(server: Server) -> bool:
    samples = await generate_all(server.grpc_address, [request(random_prompt(100, 2048), 16)])
    return len(samples[0][0].tokens) == 16


async def test_auto_takes_the_memory_that_is_left_and_serves():
    with serve(device="cuda", kv_cache_num_tokens="auto", page_size=PAGE_SIZE) as server:
        free, total = torch.cuda.mem_get_info()
        tokens = server.metric("toka_kv_pages_total") * PAGE_SIZE
        assert await answers(server)
    # 6 layers x 2 KV heads x 64, keys and values in bf16, and 4 bytes for the token itself.
    taken = tokens * (6 * 2 * 64 * 2 * 2 + 4)
    assert taken >= 0.8 * total
    assert free < 0.15 * total


async def test_a_cache_that_does_not_fit_is_refused_with_a_size_that_does():
    with pytest.raises(RuntimeError) as refused, serve(device="cuda", kv_cache_num_tokens="(2 ** 39)"):
        pass
    # The log is JSON, in which quotes may be escaped, and what failed is said by the worker and again by toka.
    said = re.search(
        r"flag kv_cache_num_tokens=549755813888: .* GiB are free beside the weights; .* lower it to (\d+) or less, or"
        r" let kv_cache_num_tokens=auto choose",
        str(refused.value),
    )
    assert said is not None, refused.value
    assert "before it was ready" in str(refused.value)
    # A little less: what others have on the device may change between two starts.
    with serve(device="cuda", kv_cache_num_tokens=int(int(said[1]) * 0.99)) as server:
        assert await answers(server)


def compiled_code(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.suffix in COMPILED_CODE}


async def test_a_second_start_compiles_nothing_and_is_faster(tmp_path):
    flags = {"device": "cuda", "torch_compile": "T", "use_cudagraphs": "T", "cudagraph_max_size": 32}
    found, seconds = [], []
    for _ in range(2):
        started = time.monotonic()
        with serve(compile_cache_dir=tmp_path, **flags) as server:
            seconds.append(time.monotonic() - started)
            assert await answers(server)
        found.append(compiled_code(tmp_path))
    assert found[0]
    assert found[1] == found[0]
    assert seconds[1] < seconds[0]
    print(f"start to ready: {seconds[0]:.1f} s without caches, {seconds[1]:.1f} s with them")
