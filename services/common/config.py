"""Every flag of every program, in one place. A config is frozen and valid once made; an error names flag and fix."""

import os
import sys
from typing import Literal, TypeVar

from pydantic import Field, field_validator, model_validator

from services.common.addresses import is_public
from services.common.flags import Bool, Config, FlagError, Float, Int, Ints, Strings, load, misspelt

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
PRIORITY_CLASSES = ("high", "normal", "low")


class GrpcConfig(Config):
    """Certificates of gRPC links. A server with a certificate speaks TLS, and with authorities wants its clients' ones
    (mTLS). A client with authorities speaks TLS, and with a certificate shows it. Unix sockets have neither."""

    grpc_cert: str | None = Field(
        None, min_length=1, description="PEM file: the certificate of gRPC links, its chain behind it"
    )
    grpc_key: str | None = Field(None, min_length=1, description="PEM file: its private key")
    grpc_ca: str | None = Field(
        None, min_length=1, description="PEM file: authorities that the other side's certificate must come from"
    )
    grpc_server_name: str | None = Field(
        None, min_length=1, description="name in the certificates of servers that are reached by another one"
    )

    @model_validator(mode="after")
    def _certificates_are_whole(self) -> "GrpcConfig":
        for name, needed in (("grpc_cert", "grpc_key"), ("grpc_key", "grpc_cert"), ("grpc_server_name", "grpc_ca")):
            if (value := getattr(self, name)) is not None and getattr(self, needed) is None:
                raise ValueError(f"flag {name}={value}: has no effect without {needed}=; leave it out, or set both")
        return self

    @property
    def has_mutual_tls(self) -> bool:
        """Its servers know who their clients are."""
        return self.grpc_cert is not None and self.grpc_ca is not None


class ServiceConfig(GrpcConfig):
    """What every program takes."""

    model: str = Field("builtin", description="Hugging Face directory or hub id; 'builtin' = the model in this package")
    tokenizer: str | None = Field(None, description="directory or hub id of the tokenizer; default: the model's")
    served_model_name: str | None = Field(None, description="model id in the API; default: the model's directory name")
    log_level: LogLevel = "INFO"
    step_deadline: Float = Field(
        30.0, ge=1, le=1e6, description="seconds without progress, while work waits, after which a process is hung"
    )
    drain_seconds: Float = Field(
        30.0, ge=0, le=1e6, description="SIGTERM lets running requests go on for so long at most; 0 = not at all"
    )
    watchdog: Bool = Field(True, description="a hung process is killed, to be started again; F: for debuggers")

    @field_validator("log_level", mode="before")
    @classmethod
    def _upper(cls, value: str) -> str:
        return value.upper() if isinstance(value, str) else value


class WorkerConfig(ServiceConfig):
    """One worker: one device, its share of the weights, and the paged KV cache."""

    worker_listen: str = Field("127.0.0.1:10410", description="address to listen on, host:port or unix:path")
    insecure_worker: Bool = Field(
        False, description="other hosts may reach the worker without mTLS: a private network guards it"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="auto: bfloat16 on cuda, float32 on cpu")
    load_format: Literal["safetensors", "dummy"] = Field(
        "safetensors", description="dummy: random weights of the model's shape, for benchmarks"
    )
    quantization: Literal["none", "fp8"] = Field("none", description="fp8: weights and activations, scaled by row")
    kv_cache_num_tokens: Int | Literal["auto"] = Field(
        128 * 1024, description="size of the KV cache in tokens; auto (cuda): all memory that the model leaves"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="auto: the model's; fp8 (cuda): keys and values take half the memory, at a loss of accuracy that"
        " docs/performance.md gives",
    )
    page_size: Int = Field(16, ge=1, le=1024, description="tokens in a KV page")
    max_tokens_per_forward: Int = Field(2048, ge=1, description="most tokens computed in one step")
    max_seqs_per_forward: Int = Field(256, ge=1, le=65536, description="most sequences running at once (slots)")
    max_context_tokens: Int | None = Field(None, ge=1, description="default: the model's own limit")
    torch_compile: Bool = Field(False, description="compile the model; on cpu this needs a C++ compiler")
    use_cudagraphs: Bool = Field(False, description="replay small decode steps as CUDA graphs; on cpu: refused")
    cudagraph_max_size: Int = Field(1024, ge=8, le=8192, description="most sequences of a step that is a CUDA graph")
    compile_cache_dir: str = Field(
        "~/.cache/tokasaurus", min_length=1, description="where compiled kernels are kept between starts"
    )
    fail_on_recompile: Bool = Field(
        False, description="a model graph that must be compiled after the start is an error; else the log tells"
    )
    torch_num_threads: Int | None = Field(None, ge=1, description="CPU threads of the model; default: torch's choice")
    dp_rank: Int = Field(0, ge=0, description="which data-parallel replica this worker belongs to")
    tp_size: Int = Field(1, ge=1, le=64, description="tensor-parallel ranks of a replica")
    tp_rank: Int = Field(0, ge=0, description="which of them this worker is")
    pp_size: Int = Field(1, ge=1, le=64, description="pipeline stages of a replica")
    pp_rank: Int = Field(0, ge=0, description="which of them this worker is in")
    pp_layers: Ints = Field((), description="layers of each pipeline stage, such as 10,11,11; default: equal times")
    async_tp_threshold: Int | None = Field(
        None,
        ge=1,
        description="tokens of a step from which on tensor-parallel products overlap with their exchange (cuda);"
        " default: never",
    )
    master_addr: str = Field(
        "127.0.0.1", min_length=1, description="where a replica's workers meet: the host of tp_rank=0 pp_rank=0"
    )
    master_port: Int = Field(10510, ge=1, le=65535, description="the port there")

    @field_validator("kv_cache_num_tokens")
    @classmethod
    def _a_size(cls, value: int | str) -> int | str:
        if value != "auto" and not 1 <= value < 2**40:
            raise ValueError("expected 1 or more tokens, or auto")
        return value

    @model_validator(mode="after")
    def _sizes_agree(self) -> "WorkerConfig":
        if self.kv_cache_num_tokens != "auto" and self.kv_cache_num_tokens < self.page_size:
            raise ValueError(
                f"flag kv_cache_num_tokens={self.kv_cache_num_tokens}: less than one page of page_size={self.page_size}"
                " tokens; raise it"
            )
        return self

    @model_validator(mode="after")
    def _no_worker_flag_without_effect(self) -> "WorkerConfig":
        for name, needed in (("cudagraph_max_size", "use_cudagraphs"), ("fail_on_recompile", "torch_compile")):
            value = getattr(self, name)
            if not getattr(self, needed) and value != WorkerConfig.model_fields[name].default:
                value = "T" if value is True else value
                raise ValueError(f"flag {name}={value}: has no effect without {needed}=T; leave it out, or set both")
        return self

    @model_validator(mode="after")
    def _ranks_are_there(self) -> "WorkerConfig":
        for rank, size in (("tp_rank", "tp_size"), ("pp_rank", "pp_size")):
            most = getattr(self, size)
            if getattr(self, rank) >= most:
                raise ValueError(
                    f"flag {rank}={getattr(self, rank)}: ranks count from 0, and {size} is {most}; expected less, or a"
                    f" larger {size}"
                )
        if self.pp_layers and (len(self.pp_layers) != self.pp_size or min(self.pp_layers) < 1):
            raise ValueError(
                f"flag pp_layers={','.join(map(str, self.pp_layers))}: expected a number of layers, 1 or more, for each"
                f" of pp_size={self.pp_size} stages"
            )
        if self.async_tp_threshold is not None and self.tp_size == 1:
            raise ValueError(
                f"flag async_tp_threshold={self.async_tp_threshold}: has no effect without tp_size=2 or more; leave it"
                " out, or set both"
            )
        if (self.async_tp_threshold or 0) > self.max_tokens_per_forward:
            raise ValueError(
                f"flag async_tp_threshold={self.async_tp_threshold}: no step has so many tokens with"
                f" max_tokens_per_forward={self.max_tokens_per_forward}; lower it, or leave it out"
            )
        for name in ("master_addr", "master_port"):
            value = getattr(self, name)
            if self.tp_size * self.pp_size == 1 and value != WorkerConfig.model_fields[name].default:
                raise ValueError(
                    f"flag {name}={value}: has no effect without tp_size=2 or pp_size=2 or more; leave it out"
                )
        return self

    @model_validator(mode="after")
    def _authorities_are_of_use(self) -> "WorkerConfig":
        if self.grpc_ca is not None and self.grpc_cert is None:
            raise ValueError(
                f"flag grpc_ca={self.grpc_ca}: has no effect without grpc_cert= and grpc_key=; leave it out, or set all"
                " three"
            )
        return self

    @model_validator(mode="after")
    def _not_for_everybody(self) -> "WorkerConfig":
        if is_public(self.worker_listen) and not self.has_mutual_tls and not self.insecure_worker:
            raise ValueError(
                f"flag worker_listen={self.worker_listen}: whoever reaches a worker may read and change everybody's"
                " requests; set grpc_cert=, grpc_key= and grpc_ca= (mTLS), listen on a loopback address or a unix"
                " socket, or, if a private network guards it, set insecure_worker=T"
            )
        return self

    @property
    def page_count(self) -> int | None:
        """Whole pages in the KV cache; None = as many as fit."""
        return None if self.kv_cache_num_tokens == "auto" else self.kv_cache_num_tokens // self.page_size


class KeysConfig(ServiceConfig):
    """Of what serves the public: who may ask."""

    api_keys_file: str | None = Field(
        None, min_length=1, description="TOML with a hash of each API key, see toka-key; default: anybody may ask"
    )
    isolate_keys: Bool = Field(False, description="an API key shares cached prefixes with itself only")
    grpc_token_file: str | None = Field(
        None, min_length=1, description="file with one secret, by which schedulers know their gateways"
    )

    @model_validator(mode="after")
    def _nothing_to_isolate_without_keys(self) -> "KeysConfig":
        if self.isolate_keys and self.api_keys_file is None:
            raise ValueError("flag isolate_keys=T: has no effect without api_keys_file; leave it out, or set both")
        return self


class SchedulerConfig(KeysConfig):
    """One scheduler: one replica's queue, pages and plans."""

    scheduler_listen: str = Field("127.0.0.1:10310", description="address to listen on, host:port or unix:path")
    worker_addresses: Strings = Field(
        ("127.0.0.1:10410",), min_length=1, description="the replica's workers, one for each rank, in any order"
    )
    scheduling_steps_ahead: Int = Field(2, ge=2, le=64, description="plans in flight to the worker")
    max_queued_sequences: Int = Field(65536, ge=1, description="accepted and not running; more are refused")
    max_samples_per_request: Int = Field(16384, ge=1, description="largest n")
    prefix_caching: Bool = Field(True, description="reuse KV pages of equal prefixes across requests")
    stats_report_seconds: Float = Field(10.0, ge=0, description="seconds between log lines about load; 0 = none")
    admission: Literal["predicted", "guaranteed"] = Field(
        "predicted", description="answers are taken to be as long as earlier ones were, or as their limits"
    )
    guaranteed_classes: Strings = Field(
        (), description="priority classes (high,normal,low) admitted as guaranteed whatever admission= says"
    )
    admission_margin: Float = Field(
        1.0, ge=0, allow_inf_nan=False, description="standard deviations of the forecast kept free; 0 = none"
    )
    priority_ageing_seconds: Float = Field(
        30.0, ge=0, le=1e6, description="a waiting priority class rises by one for so many seconds; 0 = never"
    )
    use_hydragen: Bool = Field(False, description="shared-prefix attention")
    hydragen_min_group_size: Int = Field(32, ge=2, description="fewest sequences in a Hydragen group")
    hydragen_min_prefix_len: Int = Field(256, ge=1, description="fewest tokens that a Hydragen group shares")
    pp_size: Int = Field(1, ge=1, le=64, description="pipeline stages of a replica")
    pp_num_buffer_stages: Int = Field(
        1, ge=0, le=64, description="a step is cut into pp_size + so many micro-batches; with pp_size=1 it is not cut"
    )
    record_plans: str | None = Field(None, min_length=1, description="directory to record every plan and result in")

    @field_validator("worker_addresses")
    @classmethod
    def _workers_differ(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for address in addresses:
            if addresses.count(address) > 1:
                raise ValueError(f"{address} is named twice; name the address of each rank once")
        return addresses

    @field_validator("guaranteed_classes")
    @classmethod
    def _classes_exist(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in PRIORITY_CLASSES:
                raise ValueError(f"{name!r} is no priority class; the classes are {', '.join(PRIORITY_CLASSES)}")
        return names

    @model_validator(mode="after")
    def _nothing_without_effect(self) -> "SchedulerConfig":
        """A flag that means nothing without another is refused without it."""
        fields = SchedulerConfig.model_fields
        for name, needed, there in (
            ("hydragen_min_group_size", "use_hydragen=T", self.use_hydragen),
            ("hydragen_min_prefix_len", "use_hydragen=T", self.use_hydragen),
            ("pp_num_buffer_stages", "pp_size=2 or more", self.pp_size > 1),
        ):
            value = getattr(self, name)
            if not there and value != fields[name].default:
                raise ValueError(f"flag {name}={value}: has no effect without {needed}; leave it out, or set both")
        if self.admission == "guaranteed" and self.guaranteed_classes:
            raise ValueError(
                f"flag guaranteed_classes={','.join(self.guaranteed_classes)}: has no effect with admission=guaranteed,"
                " by which every class is; leave one of them out"
            )
        return self


class GatewayConfig(KeysConfig):
    """One gateway: HTTP in, sessions to every scheduler out."""

    host: str = "127.0.0.1"
    port: Int = Field(10210, ge=0, le=65535)
    scheduler_addresses: Strings = Field(("127.0.0.1:10310",), min_length=1, description="one for each replica")
    max_body_bytes: Int = Field(32 * 1024 * 1024, ge=1024, description="largest HTTP request; beyond it: 413")
    max_choices: Int = Field(16384, ge=1, description="largest prompts x n of one HTTP request")
    max_prompt_tokens: Int | None = Field(None, ge=1, description="longest prompt; default: what the context holds")
    max_output_tokens: Int | None = Field(
        None, ge=1, description="largest max_tokens, and its default in a chat; default: what the context holds"
    )
    max_connections: Int = Field(65_536, ge=1, description="open HTTP connections of a gateway; beyond it: 503")
    max_header_bytes: Int = Field(64 * 1024, ge=1024, description="largest head of an HTTP request; beyond it: 431")
    slow_request_seconds: Float = Field(
        30.0, gt=0, le=3600, description="a request's head comes within so long, and 16 KiB of its body each time"
    )
    slow_client_seconds: Float = Field(
        60.0, gt=0, le=3600, description="a client that takes nothing of its answer for so long is cut off"
    )
    keep_alive_seconds: Float = Field(
        120.0, gt=0, le=3600, description="idle connections stay open; longer than the pools of clients keep them"
    )
    http_cert: str | None = Field(None, min_length=1, description="PEM with the certificates of HTTPS")
    http_key: str | None = Field(None, min_length=1, description="PEM with their key")
    admin_host: str = Field("127.0.0.1", min_length=1, description="where admin_port listens")
    admin_port: Int = Field(
        0, ge=0, le=65535, description="/metrics and the replicas' state are served here, and not on port=; 0: there"
    )
    store_dir: str = Field(
        "~/.local/share/tokasaurus", min_length=1, description="files, batches, responses: a directory, or fsspec's URL"
    )
    store_url: str | None = Field(
        None, description="SQLAlchemy URL of their database; default: SQLite in store_dir; none: nothing is stored"
    )
    failover_seconds: Float = Field(
        120.0, ge=0, le=86400, description="a request that lost its scheduler waits so long for another; 0 = it ends"
    )
    batch_concurrency: Int = Field(512, ge=1, le=65536, description="lines of batches that one gateway runs at once")
    tool_call_parser: Literal["auto", "llama3", "hermes", "none"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template does; none: they stay text"
    )
    reasoning_parser: Literal["auto", "qwen3", "none"] = Field(
        "auto", description="qwen3: <think>...</think> is the model's reasoning; auto: if its chat template has it"
    )

    @model_validator(mode="after")
    def _schedulers_are_verified(self) -> "GatewayConfig":
        if self.grpc_cert is not None and self.grpc_ca is None:
            raise ValueError(
                f"flag grpc_cert={self.grpc_cert}: a gateway shows it to schedulers that it can verify; set grpc_ca=,"
                " too"
            )
        return self

    @model_validator(mode="after")
    def _certificates_come_with_their_key(self) -> "GatewayConfig":
        for name, other in (("http_cert", "http_key"), ("http_key", "http_cert")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise ValueError(f"flag {name}={getattr(self, name)}: has no effect without {other}; set both")
        return self

    @model_validator(mode="after")
    def _admin_port_is_its_own(self) -> "GatewayConfig":
        if self.admin_port and self.admin_port == self.port:
            raise ValueError(f"flag admin_port={self.admin_port}: port has it already; choose another, or leave it out")
        if not self.admin_port and self.admin_host != GatewayConfig.model_fields["admin_host"].default:
            raise ValueError(
                f"flag admin_host={self.admin_host}: has no effect without admin_port; leave it out, or set both"
            )
        return self


class DeploymentConfig(WorkerConfig, SchedulerConfig, GatewayConfig):
    """What ``toka`` takes: everything its children take, and how many of them there are."""

    dp_size: Int = Field(1, ge=1, le=64, description="data-parallel replicas: a scheduler and its workers each")
    gateways: Int = Field(
        1, ge=0, le=64, description="gateway processes, which share one host and port; 0: only gRPC is served"
    )
    grpc_port: Int = Field(10310, ge=0, le=65000, description="direct gRPC clients: replica r listens on grpc_port + r")

    @model_validator(mode="after")
    def _refuse_what_a_cpu_has_not(self) -> "DeploymentConfig":
        """A flag is honoured or refused, never ignored."""
        if self.use_hydragen and self.device == "cpu":
            raise ValueError(
                "flag use_hydragen=T: a worker on cpu has no shared-prefix attention, only those on cuda have; leave"
                " the flag out, or use device=cuda"
            )
        if self.async_tp_threshold is not None and self.device == "cpu":
            raise ValueError(
                f"flag async_tp_threshold={self.async_tp_threshold}: only on cuda, and device is cpu; leave it out, or"
                " use device=cuda"
            )
        if self.kv_cache_dtype == "fp8" and self.device == "cpu":
            raise ValueError(
                "flag kv_cache_dtype=fp8: only on cuda, and device is cpu; leave it at kv_cache_dtype=auto, or use"
                " device=cuda"
            )
        return self

    @model_validator(mode="after")
    def _not_for_everybody(self) -> "DeploymentConfig":
        """In the place of a worker's own: these listen on unix sockets."""
        if self.insecure_worker:
            raise ValueError("flag insecure_worker=T: the workers of toka listen on unix sockets; leave it out")
        return self

    @model_validator(mode="after")
    def _children_are_not_placed_by_hand(self) -> "DeploymentConfig":
        addresses = ("worker_listen", "worker_addresses", "scheduler_listen", "scheduler_addresses")
        for name in (*addresses, "master_addr", "master_port", "dp_rank", "tp_rank", "pp_rank"):
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"flag {name}: toka chooses the addresses and ranks of its children itself; leave it out, or start"
                    " toka-worker, toka-scheduler and toka-gateway yourself"
                )
        return self

    @model_validator(mode="after")
    def _gateways_can_share_a_port(self) -> "DeploymentConfig":
        if self.gateways > 1 and not sys.platform.startswith("linux"):
            raise ValueError(
                f"flag gateways={self.gateways}: only Linux spreads connections over the processes that share a port;"
                " leave it at its default (gateways=1)"
            )
        return self

    @model_validator(mode="after")
    def _nothing_for_gateways_that_are_not_there(self) -> "DeploymentConfig":
        for name in GatewayConfig.model_fields.keys() - SchedulerConfig.model_fields.keys():
            value = getattr(self, name)
            if not self.gateways and value != GatewayConfig.model_fields[name].default:
                raise ValueError(f"flag {name}={value}: has no effect with gateways=0; leave one of them out")
        return self

    @model_validator(mode="after")
    def _ports_differ(self) -> "DeploymentConfig":
        if self.gateways and self.port and self.port in range(self.grpc_port, self.grpc_port + self.dp_size):
            raise ValueError(f"flag port={self.port}: a scheduler has it (grpc_port={self.grpc_port}); choose another")
        return self


K = TypeVar("K", bound=Config)


def from_command_line(kind: type[K]) -> K:
    """The config of this process from its command line and environment; exits with status 2 and the reason if wrong."""
    if any(argument in ("help", "-h", "--help") for argument in sys.argv[1:]):
        print(usage(kind))
        raise SystemExit(0)
    for sentence in misspelt(os.environ, {**DeploymentConfig.model_fields, **kind.model_fields}):
        print(f"{os.path.basename(sys.argv[0])}: warning: {sentence}", file=sys.stderr)
    try:
        return load(kind, sys.argv[1:], os.environ)
    except FlagError as error:
        print(f"{os.path.basename(sys.argv[0])}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def usage(kind: type[Config]) -> str:
    """One line for each flag: name, default, meaning."""
    program = os.path.basename(sys.argv[0])
    lines = [f"usage: {program} [flag=value ...]      (or TOKA_<FLAG>=value in the environment)", ""]
    for name, field in kind.model_fields.items():
        default = "" if field.is_required() else field.get_default()
        default = ",".join(default) if isinstance(default, tuple) else default
        lines.append(f"  {f'{name}={default}':<44} {field.description or ''}".rstrip())
    return "\n".join(lines)
