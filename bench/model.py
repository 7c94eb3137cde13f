"""Make a model directory for benchmarks: ``python -m bench.model directory=DIR shape=llama-1b [weights=T]``.

The shape is that of a real model, and the tokenizer works. Without ``weights=T`` the directory has no weights, and a
server makes random ones (``load_format=dummy``, as in vLLM). Benchmarks that load or replace weights need
``weights=T``. With random weights, no token ends an answer more often than others. So a list of tokens, spread over the
vocabulary, ends an answer. Lengths are then geometric, and stopping, prediction and admission work as with a trained
model. Equal flags give equal files. Results with such a model must say that its weights are random.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import safetensors.torch
import tokenizers
import torch
from pydantic import Field
from tokenizers import decoders, models, pre_tokenizers, trainers

from bench.local_worker import refuse
from bench.problems import read_problems
from bench.server import report
from services.common.config import from_command_line
from services.common.flags import Bool, Config, Int
from services.common.model.checkpoint_files import INDEX
from services.worker.described.checkpoint import checkpoint_shapes
from services.worker.described.registry import read_model_config

VOCAB_SIZE = 128256  # of the Llama shapes
SPECIAL_TOKENS = ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# Entries that are learned from the problems. The few-shot prompts of bench.monkeys then have about 720 tokens.
LEARNED = 1400
_TOKENS_PER_END = 150
_STRIDE = 100_003  # coprime to 26**4, so that neighbours in the vocabulary have different letters
_FILE_BYTES = 4 * 2**30  # after which a weight file ends

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB_SIZE, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# The values of the published config.json of Llama 3.2 1B, Llama 3.1 8B and 70B, Qwen3-4B and 30B-A3B, and gpt-oss-20b.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-1b": _LLAMA | {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 8192, "tie_word_embeddings": True, "rope_scaling": _LLAMA3_ROPE,
    },
    "llama-8b": _LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "tie_word_embeddings": False,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "llama-70b": _LLAMA | {
        "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 28672, "tie_word_embeddings": False,
        "rope_scaling": _LLAMA3_ROPE | {"factor": 8.0},
    },
    "qwen3-4b": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2560,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 9728, "tie_word_embeddings": True, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "max_position_embeddings": 40960,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936,
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "tie_word_embeddings": False, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "attention_bias": False, "use_sliding_window": False, "max_position_embeddings": 40960,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088,
        "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8,
        "head_dim": 64, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128,
        "tie_word_embeddings": False, "rope_theta": 150000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "attention_bias": True, "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "tiny": _LLAMA | {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 160, "tie_word_embeddings": True, "rope_scaling": _LLAMA3_ROPE,
    },
}  # fmt: skip


# The settings of published checkpoints.
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "fp8-blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
}


class ModelConfig(Config):
    """The flags."""

    directory: str = Field(min_length=1, description="directory to write")
    shape: Literal["llama-1b", "llama-8b", "llama-70b", "qwen3-4b", "qwen3-30b-a3b", "gpt-oss-20b", "tiny"] = "llama-1b"
    eos_tokens: Int | None = Field(
        None, ge=1, le=VOCAB_SIZE // 2, description="tokens that end an answer; default: 1 in 150"
    )
    weights: Bool = Field(False, description="also write random weights, in bfloat16")
    quantization: Literal["none", "fp8", "fp8-blocks", "gptq", "awq"] = Field(
        "none", description="with load_format=dummy, the server's random weights are those of such a checkpoint"
    )
    bits: Int | None = Field(None, ge=4, le=8, description="of weights with quantization=gptq: 4 or 8; default: 4")
    group_size: Int | None = Field(
        None, ge=32, description="inputs that share a scale, with quantization=gptq or awq; default: 128"
    )


def main() -> None:
    config = from_command_line(ModelConfig)
    count = config.eos_tokens or default_ends(config.shape)
    if config.weights and config.quantization != "none":
        refuse(
            f"weights=T writes bfloat16, which quantization={config.quantization} does not describe; use one of both"
        )
    settings = QUANTIZATIONS.get(config.quantization, {})
    integers = config.model_dump(include={"bits", "group_size"}, exclude_none=True)
    if integers and "bits" not in settings:
        refuse(f"{next(iter(integers))} describes integers; use it with quantization=gptq or awq")
    directory = make_model(Path(config.directory), config.shape, count, settings | integers)
    if config.weights:
        write_weights(directory, config.shape)
    size, vocab_size = sum(path.stat().st_size for path in directory.iterdir()), SHAPES[config.shape]["vocab_size"]
    print(f"{directory}: {config.shape}, {vocab_size} tokens, {count} of them end an answer")
    report({"directory": str(directory), "shape": config.shape, "eos_tokens": count, "bytes": size})


def make_model(
    directory: Path,
    shape: str = "llama-1b",
    eos_tokens: int | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> Path:
    """Write config, generation config and tokenizer into ``directory``, and return it.

    ``eos_tokens`` is the number of tokens that end an answer, by default ``default_ends(shape)``. ``quantization`` is
    the ``quantization_config`` of ``config.json``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = SHAPES[shape]["vocab_size"]
    shared = {
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "initializer_range": 0.02,
        "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    quantized = {"quantization_config": dict(quantization)} if quantization else {}
    _write(directory / "config.json", shared | SHAPES[shape] | quantized)
    # No sampling settings, because only some servers would use them.
    _write(
        directory / "generation_config.json",
        {"bos_token_id": 0, "eos_token_id": ends(eos_tokens or default_ends(shape), vocab_size)},
    )
    make_tokenizer(vocab_size).save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0], "add_bos_token": False, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "model_max_length": 131072, "chat_template": _CHAT_TEMPLATE,
    }  # fmt: skip
    _write(directory / "tokenizer_config.json", described)
    return directory


def write_weights(directory: Path, shape: str) -> None:
    """Write random weights of ``shape`` into ``directory``: matrices normal with deviation 0.02, norms 1, biases 0.

    Equal shapes give equal weights. The files have the names and the index of a published checkpoint.
    """
    placed: dict[str, str] = {}
    size = 0
    shapes = checkpoint_shapes(read_model_config(SHAPES[shape]))
    with ThreadPoolExecutor() as threads:
        for number, names in enumerate(_files(shapes)):
            file = f"model-{number + 1:05}.safetensors"
            tensors = dict(zip(names, threads.map(_random_weight, names, map(shapes.__getitem__, names)), strict=True))
            safetensors.torch.save_file(tensors, directory / file, {"format": "pt"})
            placed |= dict.fromkeys(names, file)
            size += sum(each.nbytes for each in tensors.values())
    _write(directory / INDEX, {"metadata": {"total_size": size}, "weight_map": placed})


def _files(shapes: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Return the names of the tensors of each file."""
    files, size = [[]], 0
    for name, extents in shapes.items():
        if size > _FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(name)
        size += 2 * math.prod(extents)
    return files


def _random_weight(name: str, extents: Sequence[int]) -> torch.Tensor:
    if len(extents) == 1:
        return torch.full(tuple(extents), float(name.endswith("weight")), dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(*extents, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def default_ends(shape: str) -> int:
    """Return the number of tokens that end an answer with a mean length of ``_TOKENS_PER_END`` tokens."""
    vocab_size: int = SHAPES[shape]["vocab_size"]
    return vocab_size // _TOKENS_PER_END


def ends(count: int, vocab_size: int) -> list[int]:
    """Return ``count`` of ``vocab_size`` token ids at equal distances. None is special or occurs in tokenised text."""
    return [LEARNED + index * (vocab_size - LEARNED) // count for index in range(count)]


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    """Return a byte-level BPE of ``vocab_size`` entries.

    Entries that are not learned from the problems have four letters. A model can generate them, but no text contains
    them, because no merge produces them.
    """
    learned = tokenizers.Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learned.train_from_iterator((f"{problem.prompt} {problem.solution}\n\n" for problem in read_problems()), trainer)
    described = json.loads(learned.to_str())["model"]
    vocabulary = described["vocab"]
    fresh = (piece for piece in _four_letters() if piece not in described["vocab"])
    vocabulary = vocabulary | {
        piece: LEARNED + index for index, piece in enumerate(islice(fresh, vocab_size - LEARNED))
    }
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair) for pair in described["merges"]]))
    made.add_special_tokens(list(SPECIAL_TOKENS))
    made.pre_tokenizer = learned.pre_tokenizer
    made.decoder = decoders.ByteLevel()
    return made


def _four_letters():
    letters, count = len(ascii_lowercase), len(ascii_lowercase) ** 4
    for index in range(count):
        number, piece = index * _STRIDE % count, ""
        for _ in range(4):
            number, letter = divmod(number, letters)
            piece += ascii_lowercase[letter]
        yield piece


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
