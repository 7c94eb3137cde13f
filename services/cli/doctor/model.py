"""Checks the model: its files, and whether the worker supports it with these flags."""

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from services.cli.doctor.findings import Finding, amount, fail, from_error, ok, unknown, warn
from services.cli.doctor.machine import Machine
from services.cli.doctor.nvml import GpuInfo
from services.common.config import DeploymentConfig, WorkerConfig
from services.common.errors import InvalidRequest
from services.common.model.broken_file import BrokenFile
from services.common.model.checkpoint_files import CheckpointShard, read_shards
from services.common.model.files import (
    BUILTIN_MODELS,
    BUILTIN_NAMES,
    SMOLLM2,
    TEXT_FILES,
    WEIGHT_FILES,
    read_card,
    resolve,
)
from services.common.model.gguf_file import is_gguf
from services.common.model.quantized.checkpoint import quantization_of, read_checkpoint
from services.worker.described.checkpoint import checkpoint_shapes, is_ignored
from services.worker.described.config import ModelConfig
from services.worker.described.foreign import read_described, refuse_missing_library
from services.worker.described.heads import laid_out
from services.worker.described.ranks import Ranks
from services.worker.described.refusals import (
    refuse_cuda_only_flags,
    refuse_fp8_cache,
    refuse_fp8_products,
    refuse_integer_weights,
    refuse_unquantizable_sizes,
    refuse_unrecordable_experts,
    refuse_unsupported_cuda_sizes,
)
from services.worker.described.shares import local_config, refuse_unshareable
from services.worker.described.stages import layers_of


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a supported model, from which the memory is computed."""

    described: ModelConfig  # with the context limit of the flags
    stages: tuple[range, ...]  # layers

    @property
    def max_context(self) -> int:
        """Longest context in tokens."""
        return self.described.max_context_tokens

    def laid_out(self, device: str) -> "ModelShape":
        """Return the shape with the sizes that the worker uses on a ``device``, ``cpu`` or ``cuda``."""
        return replace(self, described=laid_out(self.described, device))


def find(config: DeploymentConfig) -> tuple[Path | None, list[Finding]]:
    """Return the directory of the model on this machine. Download nothing."""
    path = Path(config.model)
    named = config.model in BUILTIN_MODELS or config.model == SMOLLM2 or config.model.startswith((".", "/", "~"))
    if named or path.exists() or is_gguf(path):
        try:
            return resolve(config.model, weights=False), []
        except InvalidRequest as error:
            problem = error.message.partition(": ")[0]
            return None, [fail("model", problem, f"give a directory, a GGUF file, a hub id, {BUILTIN_NAMES}")]
    import huggingface_hub  # its client takes time to load

    wanted = [*TEXT_FILES, *(WEIGHT_FILES if config.load_format != "dummy" else ())]
    try:
        found = huggingface_hub.snapshot_download(config.model, allow_patterns=wanted, local_files_only=True)
    except (OSError, ValueError) as error:  # it is not in the cache, or is no hub id
        text = f"{config.model} is not on this machine ({type(error).__name__}); the start downloads it"
        return None, [
            warn("model", text, f"toka-download model={config.model} downloads it now, or prints why it cannot")
        ]
    return Path(found), []


def check_config(config: DeploymentConfig, directory: Path) -> tuple[ModelShape | None, list[Finding]]:
    """Check ``config.json``, and the flags that depend on it."""
    try:
        _, described, _ = read_described(directory, config.part(WorkerConfig))
        if described.foreign is not None:
            if importlib.util.find_spec("torch") is not None:  # otherwise the workers run elsewhere
                refuse_missing_library(described.foreign)
            if config.load_format != "dummy":
                described = replace(described, parameters=_count_parameters(directory))
        if config.return_routed_experts:
            refuse_unrecordable_experts(described)
        refuse_unshareable(described, config.tp_size, expert_parallel=config.expert_parallel)
        stages = layers_of(described, config.pp_size, config.pp_layers)
        card = read_card(str(directory))
    except InvalidRequest as error:
        return None, [_with_fix(error.message)]
    limit = described.max_context_tokens
    if (config.max_context_tokens or 0) > limit:
        text = f"flag max_context_tokens={config.max_context_tokens}: the model's own limit is {limit}"
        return None, [fail("model", text, "lower it or leave it out")]
    text = f"{directory}: {len(described.layers)} layers of {described.hidden_size}, {described.heads} heads and"
    text += f" {described.kv_heads} for keys, {described.vocab_size:,} tokens, context of {limit:,}"
    if described.foreign is not None:
        text += f"; {described.foreign} runs through transformers (model_impl), which checks it at the start"
    findings = [ok("model", text)]
    if not card.eos_token_ids:
        fix = "add eos_token_id to generation_config.json"
        findings.append(warn("model", "no eos_token_id: answers end at max_tokens or a stop string only", fix))
    described = replace(described, max_context_tokens=config.max_context_tokens or limit)
    return ModelShape(described, tuple(stages)), findings


def _count_parameters(directory: Path) -> int:
    """Return the number of elements of all tensors in the weight files. Broken files are left out."""
    shards = [each for each in read_shards(directory) if isinstance(each, CheckpointShard)]
    return sum(prod(each.shape) for shard in shards for each in shard.tensors.values())


def check_device(machine: Machine, shape: ModelShape) -> Iterator[Finding]:
    """Check that the workers' devices support the flags and sizes of the model. Yield failures only."""
    config = machine.config
    try:
        if config.quantization == "fp8":
            refuse_unquantizable_sizes(_share(config, shape), config.tp_size)
        if config.quantization in ("int8", "int4"):
            refuse_integer_weights(_share(config, shape), config.quantization, config.tp_size)
        if machine.on_cuda:
            refuse_unsupported_cuda_sizes(config.page_size, shape.described.stored_head_dim)
            _refuse_fp8(config, machine.gpus[: machine.workers])
            return
        refuse_cuda_only_flags(config.part(WorkerConfig))
    except InvalidRequest as error:
        yield from_error("flags", error.message)
        return
    if config.use_hydragen is True:
        text = "flag use_hydragen=T: has no effect because the workers would run on CPUs"
        yield warn("flags", text, "leave it out, or use device=cuda")


def _share(config: DeploymentConfig, shape: ModelShape) -> ModelConfig:
    """Return the share of each rank in all layers."""
    ranks = Ranks(0, config.tp_size, whole_experts=config.expert_parallel)
    return local_config(shape.described, ranks, range(len(shape.described.layers)))


def _refuse_fp8(config: DeploymentConfig, gpus: Sequence[GpuInfo]) -> None:
    for gpu in gpus:
        if config.kv_cache_dtype == "fp8":
            refuse_fp8_cache(gpu.name, gpu.capability)
        if config.quantization == "fp8":
            refuse_fp8_products(gpu.name, gpu.capability)


def _with_fix(message: str) -> Finding:
    if "; " in message:
        return from_error("model", message)
    return fail("model", message, "give the directory of a model that this worker runs, with all of its files")


def check_tokenizer(config: DeploymentConfig, directory: Path) -> Iterator[Finding]:
    """Check the tokenizer by loading it."""
    try:
        from services.common.text.tokenizer import Tokenizer  # missing if only the commands are installed
    except ImportError as error:
        yield unknown("tokenizer", f"not checked: {error.name} is not installed", "pip install 'tokasaurus[text]'")
        return
    place = config.tokenizer or str(directory)
    if not Path(place).is_dir() and config.tokenizer:
        yield unknown("tokenizer", f"{place} is not a directory here: not checked", f"toka-download model={place}")
        return
    try:
        tokenizer = Tokenizer.load(place)
    except InvalidRequest as error:
        yield fail("tokenizer", error.message, "fetch tokenizer.json and its neighbours, or name another tokenizer=")
        return
    if tokenizer.has_chat_template:
        yield ok("tokenizer", f"{place}, with a chat template")
    else:
        fix = "use completions, or add chat_template.jinja to its directory"
        yield warn("tokenizer", f"{place}: no chat template, so chats are refused", fix)


def check_weights(config: DeploymentConfig, directory: Path, described: ModelConfig | None) -> Iterator[Finding]:
    """Check that the files are complete, and contain the tensors of ``config.json`` (None if it is not readable)."""
    if config.load_format == "dummy":
        yield ok("weights", "load_format=dummy: none are read")
        return
    shards: list[CheckpointShard] = []
    broken = False
    try:
        quantization = quantization_of(directory)
        found = list(read_checkpoint(directory))
    except InvalidRequest as error:
        yield from_error("weights", error.message)
        return
    for each in found:
        if isinstance(each, BrokenFile):
            broken = True
            yield fail("weights", each.text, each.fix)
        else:
            shards.append(each)
    if broken:
        return
    if described is not None and described.foreign is None:
        stored = {name: each.shape for shard in shards for name, each in shard.tensors.items()}
        if quantization is not None:  # a bias that the architecture lacks may be zero; the worker reads its values
            known = checkpoint_shapes(described)
            stored = {name: shape for name, shape in stored.items() if name in known or not name.endswith(".bias")}
        differences = list(_compare(stored, described))
        yield from differences
        if differences:
            return
    size = sum(shard.size for shard in shards)
    formats = ", ".join(dict.fromkeys(name for shard in shards for name in shard.formats))
    if is_gguf(directory):
        formats = f"GGUF with {formats}"
    elif quantization is not None:
        formats = f"{quantization.method} with {formats}"
    yield ok(
        "weights", f"{len(shards)} file{'s' * (len(shards) != 1)}, {amount(size)}, complete, {formats}", bytes=size
    )


def _compare(stored: Mapping[str, tuple[int, ...]], described: ModelConfig) -> Iterator[Finding]:
    expected = checkpoint_shapes(described)
    absent = sorted(expected.keys() - stored.keys())
    unexpected = sorted(name for name in stored.keys() - expected.keys() if not is_ignored(name, described))
    other = sorted(name for name in expected.keys() & stored.keys() if expected[name] != stored[name])
    if absent:
        text = f"{len(absent)} tensors that config.json asks for are missing, e.g. {absent[0]}"
        yield fail("weights", text, "fetch the model again, config.json with it")
    if other:
        text = f"{other[0]} has shape {list(stored[other[0]])}, config.json asks for {list(expected[other[0]])}"
        yield fail("weights", text, "config.json and the weights do not belong together: fetch both again")
    if unexpected:
        text = f"{len(unexpected)} tensors have no place in this architecture, e.g. {unexpected[0]}"
        yield fail("weights", text, "fetch the weights and config.json again: they do not belong together")
