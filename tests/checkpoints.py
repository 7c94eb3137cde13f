"""Tiny Hugging Face checkpoints with random weights and a real tokenizer, as transformers itself writes them.

A checkpoint takes about a second to make: callers keep one for a test session.
"""

import json
from pathlib import Path
from typing import Any, Literal

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

# The classes of transformers, and what a tiny model of each needs beside the sizes that all have.
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 40}),
    "gemma3": ("Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 40}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{"num_experts_per_tok": 3, "n_routed_experts": 8, "moe_intermediate_size": 48, "n_group": 2},
            **{"topk_group": 1, "routed_scaling_factor": 1.5, "use_qk_norm": True, "head_dim": 32},
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 48,
            "head_dim": 16,
            "sliding_window": 40,
        },
    ),
    "granite": (
        "Granite",
        {
            **{"attention_multiplier": 0.2, "residual_multiplier": 0.4},
            **{"embedding_multiplier": 2.5, "logits_scaling": 3.0},
        },
    ),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}),
    "olmo2": ("Olmo2", {}),
    "phi3": ("Phi3", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),  # not hidden_size / heads
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **{"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
            **{"norm_topk_prob": True, "head_dim": 32},
        },
    ),
    "smollm3": ("SmolLM3", {}),
}
ARCHITECTURES = tuple(_KINDS)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
MAX_CONTEXT_TOKENS = 1024
TOKENIZER_VOCABULARY = 400

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
_SENTENCES = (
    "A worker runs the plans that its scheduler sends and keeps no opinion of its own.",
    "The gateway turns an HTTP request into a few messages, and messages back into text.",
    "Pages of sixteen tokens hold the keys and the values of every running sequence.",
    "How many apples are left when 12 of 30 are eaten? 30 - 12 = 18, so the answer is 18.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich: naïve café, déjà vu.",
    "def add(first, second):\n    return first + second\n\nprint(add(2, 3))\n",
    "今日はいい天気ですね。 Привет, мир! 🙂 ¿Qué tal?",
)


def make_checkpoint(
    directory: Path,
    architecture: str,
    *,
    sharded: bool = False,
    tied: bool = False,
    rope_scaling: dict[str, Any] | None = None,
    tokenizer: Literal["bytes", "sentencepiece"] = "bytes",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> Path:
    """Write a checkpoint of ``architecture`` (one of ``ARCHITECTURES``) into ``directory`` and return the directory.

    ``rope_scaling`` is what transformers 5 calls ``rope_parameters``, without ``rope_theta`` (``LLAMA3_ROPE`` is one);
    ``overrides`` go to the architecture's config. Equal arguments give equal files.
    """
    transformers.utils.logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory, tokenizer)
    kind, extra = _KINDS[architecture]
    config_kind = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(kind, kind) + "Config")
    model_kind = getattr(transformers, f"{kind}ForCausalLM")
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_theta": 10000.0, **(rope_scaling or {"rope_type": "default"})},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    if architecture == "gemma3":  # a rotation for each type of layer
        local = {"rope_type": "default", "rope_theta": 1000.0}
        settings["rope_parameters"] = {"full_attention": settings["rope_parameters"], "sliding_attention": local}
    config = config_kind(**settings | extra | overrides)
    model = model_kind(config)
    randomise(model, seed)
    model.to(dtype).save_pretrained(directory, **({"max_shard_size": "150KB"} if sharded else {}))
    return directory


def write_tokenizer(directory: Path, kind: Literal["bytes", "sentencepiece"]) -> int:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; returns the number of tokens.

    Id 0 is the beginning of a sequence and 1 its end, in both kinds. ``bytes`` is a byte-level BPE as in Llama 3 and
    Qwen that adds nothing to a text; ``sentencepiece`` is a BPE with byte fallback as in Llama 2 that adds ``<s>``.
    """
    made, bos, eos = _byte_level() if kind == "bytes" else _sentencepiece()
    made.save(str(directory / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "add_bos_token": kind == "sentencepiece",
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(described, indent=2) + "\n")
    return made.get_vocab_size()


def _byte_level() -> tuple[tokenizers.Tokenizer, str, str]:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_VOCABULARY,
        special_tokens=["<|begin|>", "<|endoftext|>", *_CHAT_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_SENTENCES, trainer)
    return made, "<|begin|>", "<|endoftext|>"


def _sentencepiece() -> tuple[tokenizers.Tokenizer, str, str]:
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    # Other characters stay out of the vocabulary, so that texts with them fall back to bytes.
    alphabet = sorted({character for sentence in _SENTENCES for character in sentence if character.isascii()} | {"▁"})
    trainer = trainers.BpeTrainer(
        vocab_size=130, initial_alphabet=alphabet, limit_alphabet=len(alphabet), show_progress=False
    )
    trained.train_from_iterator([f"▁{sentence}" for sentence in _SENTENCES], trainer)
    learned = json.loads(trained.to_str())["model"]

    pieces = ["<s>", "</s>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += sorted(learned["vocab"], key=learned["vocab"].get)
    merges = [tuple(pair) for pair in learned["merges"]]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.add_special_tokens(["<s>", "</s>", "<unk>", *_CHAT_TOKENS])
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 0)]
    )
    return made, "<s>", "</s>"


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Every parameter random (biases and norms too), scaled so that activations and logits stay near one."""
    generator = torch.Generator().manual_seed(seed)
    stored = dict(model.named_parameters())
    stored |= {name: each for name, each in model.named_buffers() if name.endswith("correction_bias")}
    with torch.no_grad():
        for name, parameter in stored.items():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name.lower() or ".ln_" in name:
                parameter.add_(0.2 * noise)  # 1, or 0 where the model adds 1
            elif parameter.dim() == 1 or name.endswith("_bias"):
                parameter.copy_(0.2 * noise)
            else:
                gain = 3.0 if any(each in name for each in ("lm_head", "embed", "predictions.decoder")) else 1.0
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
