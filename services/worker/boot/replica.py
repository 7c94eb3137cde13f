"""The connection of a worker to the others of its replica, which must have the same flags and the same model."""

from pathlib import Path

import torch

from services.common.config import WorkerConfig
from services.common.model.fingerprint import model_fingerprint
from services.worker.attention import flashinfer_spans
from services.worker.described.choices import NAMES
from services.worker.described.ranks import Ranks
from services.worker.parallel.group import RankGroup
from services.worker.parallel.rendezvous import FILES, INSTALLED

# Flags that must be equal on all workers of a replica, since they run the same plans.
_SHARED_FLAGS = (
    *("model", "tp_size", "pp_size", "pp_layers", "dp_rank", "dtype", "load_format", "expert_parallel"),
    *("return_routed_experts", "kv_cache_dtype", "page_size", "max_context_tokens"),
    *("piecewise_cudagraph_max_tokens", "async_tp_threshold", *NAMES),
)


def join_replica(
    config: WorkerConfig, ranks: Ranks, device: torch.device, dtype: torch.dtype, head_dim: int, directory: Path
) -> RankGroup | None:
    """Wait for the other workers of the replica, and return the connections. Return None for a single rank.

    ``directory`` has the files of the model.
    """
    if ranks.alone:
        return None
    settings = config.model_dump(mode="json", include=set(_SHARED_FLAGS))
    settings |= {"device": device.type, "dtype": str(dtype).removeprefix("torch.")}
    # With FlashInfer, other steps are CUDA graphs. All ranks must launch the same steps in the same way.
    settings |= {INSTALLED: device.type == "cuda" and flashinfer_spans.available(head_dim, dtype)}
    settings |= {FILES: model_fingerprint(directory, weights=config.load_format != "dummy")}
    return RankGroup(ranks, config.master_addr, config.master_port, device, settings)
