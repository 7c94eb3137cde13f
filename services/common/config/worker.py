"""The flags of a worker."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from services.common.addresses import is_public
from services.common.config.grpc import GrpcFlags, refuse_unused_authorities
from services.common.config.metrics import MetricsFlags
from services.common.config.service import ServiceFlags
from services.common.config.shared import PipelineSize
from services.common.flags import AutoBool, AutoInt, Bool, Config, CudaOnly, Examples, Int, Ints, Needs, Strings, within

MASTER_PORT = 10510  # where the ranks of a replica meet

_RANKS = Needs("tp_size", "pp_size", least=2)


class WorkerFlags(Config):
    """Workers: devices, weights, the KV cache and the sizes of steps."""

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a device, else cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights, activations and the KV cache; auto: bfloat16 on cuda, float32 on cpu"
    )
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto",
        description="implementation of the layers; transformers: the code of the transformers library, with the"
        " worker's attention; auto: native for the architectures that have it, else transformers",
    )
    load_format: Literal["safetensors", "dummy"] = Field(
        "safetensors", description="dummy: random weights of the model's shape, for benchmarks"
    )
    weight_directories: Strings = Field(
        (),
        description="directories from which the weights may be replaced while the worker runs, and all below them;"
        " uploads are written into the first; default: none",
    )
    quantization: Literal["auto", "none", "checkpoint", "fp8", "int8", "int4"] = Field(
        "auto",
        description="none: weights in dtype, also those of a quantized checkpoint; checkpoint (cuda): as the checkpoint"
        " has them, where there is a product for its format; fp8: weights and activations, scaled by row; int8, int4:"
        " weights, scaled in groups of inputs, which makes decoding faster; auto: checkpoint on cuda if weights can"
        " stay quantized; int8 or int4 on cpu for a GGUF file whose integers they keep; else none",
    )
    kv_cache_num_tokens: Annotated[AutoInt, within(1, 2**40)] = Field(
        "auto",
        description="size of the KV cache in tokens; auto: on cuda all memory that the model leaves, on cpu at most"
        " 128 Ki tokens and at most half of the free memory",
    )
    kv_cache_dtype: Annotated[Literal["auto", "fp8"], CudaOnly("leave it at kv_cache_dtype=auto")] = Field(
        "auto",
        description="auto: the model's; fp8 (cuda): keys and values take half the memory, at a loss of accuracy that"
        " docs/performance/experts-and-quantized-weights.md gives",
    )
    return_routed_experts: Bool = Field(
        False,
        description="keep the experts that every layer chooses for every token beside the KV cache, for requests that"
        " ask for them (return_routed_experts); only for mixtures of experts",
    )
    page_size: Int = Field(16, ge=1, le=1024, description="tokens in a KV page; on cuda a power of two")
    max_tokens_per_forward: Annotated[AutoInt, within(1, 2**31)] = Field(
        "auto", description="most tokens computed in one step; auto: by the device's speed, the model and memory"
    )
    max_seqs_per_forward: Annotated[AutoInt, within(1, 65536)] = Field(
        "auto", description="most sequences running at once (slots); auto: by the size of the KV cache"
    )
    max_context_tokens: Int | None = Field(
        None, ge=1, description="most tokens of a prompt and its answer; default: the model's limit"
    )
    max_top_logprobs: Int = Field(20, ge=0, le=20, description="largest top_logprobs of a request")
    torch_compile: AutoBool = Field(
        "auto",
        description="compile the model's layers; on cpu this needs a C++ compiler; auto: F, or T with"
        " fail_on_recompile=T",
    )
    use_cudagraphs: Annotated[AutoBool, CudaOnly()] = Field(
        "auto", description="replay small decode steps as CUDA graphs; auto: on cuda; T is refused on cpu"
    )
    cudagraph_max_size: Annotated[AutoInt, within(8, 8192), Needs("use_cudagraphs"), CudaOnly()] = Field(
        "auto", description="most sequences of a step that is a CUDA graph, 8 to 8192; auto: by the size of a layer"
    )
    piecewise_cudagraph_max_tokens: Annotated[AutoInt, within(0, 2**31), Needs("use_cudagraphs"), CudaOnly()] = Field(
        "auto",
        description="most tokens of a step with prompts that is captured, as one CUDA graph or as graphs between its"
        " attentions; 0: none; auto: 2048, or max_tokens_per_forward with tp_size=2 or more, or max_seqs_per_forward"
        " with experts",
    )
    compile_cache_dir: str = Field(
        "~/.cache/tokasaurus", min_length=1, description="where compiled kernels are kept between starts"
    )
    fail_on_recompile: Annotated[Bool, Needs("torch_compile")] = Field(
        False, description="a model graph that must be compiled after the start is an error; F: a line in the log"
    )
    torch_num_threads: Int | None = Field(
        None, ge=1, description="CPU threads of the model; default: all processors; no effect on cuda"
    )
    dp_size: Int = Field(1, ge=1, le=64, description="data-parallel replicas: a scheduler and its workers each")
    tp_size: Int = Field(1, ge=1, le=64, description="tensor-parallel ranks of a replica")
    expert_parallel: Annotated[Bool, Needs("tp_size", least=2)] = Field(
        False, description="tensor-parallel ranks have whole experts of a mixture, instead of a part of each"
    )
    pp_size: PipelineSize = 1
    pp_layers: Ints = Field((), description="layers of each pipeline stage, such as 10,11,11; default: equal times")
    async_tp_threshold: Annotated[Int | None, Needs("tp_size", least=2), CudaOnly()] = Field(
        None,
        ge=1,
        description="tokens of a step from which on tensor-parallel products overlap with their exchange (cuda);"
        " default: never",
    )

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.kv_cache_num_tokens != "auto" and self.kv_cache_num_tokens < self.page_size:
            raise ValueError(
                f"flag kv_cache_num_tokens={self.kv_cache_num_tokens}: less than one page of page_size={self.page_size}"
                " tokens; raise it"
            )
        return self

    @model_validator(mode="after")
    def _every_stage_has_layers(self) -> Self:
        if self.pp_layers and (len(self.pp_layers) != self.pp_size or min(self.pp_layers) < 1):
            raise ValueError(
                f"flag pp_layers={','.join(map(str, self.pp_layers))}: expected a number of layers, 1 or more, for each"
                f" of pp_size={self.pp_size} stages"
            )
        return self

    @model_validator(mode="after")
    def _one_stage_has_all_experts(self) -> Self:
        if self.return_routed_experts and self.pp_size > 1:
            raise ValueError(
                f"flag return_routed_experts=T: not with pp_size={self.pp_size}, since each pipeline stage has the"
                " experts of its own layers only; use tp_size instead, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _steps_reach_the_thresholds(self) -> Self:
        for name in ("async_tp_threshold", "piecewise_cudagraph_max_tokens"):
            value, most = getattr(self, name), self.max_tokens_per_forward
            if most != "auto" and value != "auto" and (value or 0) > most:
                raise ValueError(
                    f"flag {name}={value}: more tokens than a step has with"
                    f" max_tokens_per_forward={self.max_tokens_per_forward}; lower it, or leave it out"
                )
        return self


class WorkerPlaceFlags(Config):
    """The address of a worker and its rank in a replica. ``toka`` chooses them itself."""

    worker_listen: str = Field("127.0.0.1:10410", description="address to listen on, host:port or unix:path")
    insecure_worker: Bool = Field(
        False, description="other hosts may reach the worker without mTLS: a private network guards it"
    )
    dp_rank: Int = Field(0, ge=0, description="data-parallel replica of this worker, from 0")
    tp_rank: Int = Field(0, ge=0, description="tensor-parallel rank of this worker, from 0")
    pp_rank: Int = Field(0, ge=0, description="pipeline stage of this worker, from 0")
    master_addr: Annotated[str, _RANKS] = Field(
        "127.0.0.1", min_length=1, description="where a replica's workers meet: the host of tp_rank=0 pp_rank=0"
    )
    master_port: Annotated[Int, _RANKS] = Field(MASTER_PORT, ge=1, le=65535, description="where they meet: the port")


class WorkerConfig(WorkerPlaceFlags, WorkerFlags, MetricsFlags, ServiceFlags, GrpcFlags):
    """A worker: one device, its share of the weights, and the paged KV cache."""

    examples: ClassVar[Examples] = (
        ("", "the built-in model on 127.0.0.1:10410, on a GPU where there is one"),
        ("model=/models/M", "one GPU, with all of its memory"),
        ("model=/models/M tp_size=2 tp_rank=1 master_addr=node1", "the second of two ranks, which meet at node1"),
    )

    @model_validator(mode="after")
    def _ranks_exist(self) -> Self:
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            most = getattr(self, size)
            if getattr(self, rank) >= most:
                raise ValueError(
                    f"flag {rank}={getattr(self, rank)}: ranks count from 0, and {size} is {most}; expected less, or a"
                    f" larger {size}"
                )
        return self

    @model_validator(mode="after")
    def _is_protected(self) -> Self:
        refuse_unused_authorities(self)
        if is_public(self.worker_listen) and not self.has_mutual_tls and not self.insecure_worker:
            raise ValueError(
                f"flag worker_listen={self.worker_listen}: any program that reaches a worker can read and change all"
                " requests; set grpc_cert=, grpc_key= and grpc_ca= (mTLS), listen on a loopback address or a unix"
                " socket, or, if a private network guards it, set insecure_worker=T"
            )
        return self


class ChosenWorkerConfig(WorkerConfig):
    """A worker's config in which only ``kv_cache_num_tokens`` may be ``auto``: on CUDA the boot measures what fits."""

    torch_compile: Bool = False
    use_cudagraphs: Bool = False
    max_seqs_per_forward: Int = 256
    max_tokens_per_forward: Int = 2048
    cudagraph_max_size: Int = 1024
    piecewise_cudagraph_max_tokens: Int = 0

    @property
    def piecewise_tokens(self) -> int:
        """The most tokens of a step that runs as piecewise CUDA graphs; 0 without CUDA graphs."""
        return self.piecewise_cudagraph_max_tokens if self.use_cudagraphs else 0

    @property
    def page_count(self) -> int | None:
        """The number of whole pages in the KV cache, or None for all that fit."""
        return None if self.kv_cache_num_tokens == "auto" else self.kv_cache_num_tokens // self.page_size
