"""Tiny checkpoints of architectures without a native implementation, as transformers itself writes them."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import randomise, write_tokenizer

# Sizes under the keys that architectures have for them. A config takes those that its class knows.
_SIZES = {
    **{"vocab_size": 400, "max_position_embeddings": 256, "hidden_size": 64, "intermediate_size": 96},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "ffn_dim": 96, "word_embed_proj_dim": 64},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4},
    **{"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    **{"n_shared_experts": 1, "moe_num_shared_experts": 1, "shared_expert_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 1},
    "tie_word_embeddings": False,  # with a tied head, models of random weights repeat their input
}
# Heads whose keys and values are projected from a smaller vector.
_LATENT = {
    **{"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12},
    **{"head_dim": 8, "num_key_value_heads": 4},
}
_BERT = {"is_decoder": True}
_GEMMA = {
    **{"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 20},
    **{"vocab_size_per_layer_input": 400, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
}
_LOCAL = [[["global", "local"], 1], [["global"], 1]]
_CHUNKS = {
    **{"attention_chunk_size": 24, "no_rope_layers": [1, 0, 1], "attn_temperature_tuning": True, "floor_scale": 8},
    "intermediate_size_mlp": 96,
}
_LONGCAT = _LATENT | {"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "moe_topk": 2}
_BART = {"d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
_WINDOWS = {"sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

# The classes of transformers and the settings that the test of each wants beside the sizes.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", {}),
    "apertus": ("Apertus", {}),
    "arcee": ("Arcee", {}),
    "aria_text": ("AriaText", {}),
    "bart": ("Bart", _BART),
    "bert": ("Bert", _BERT),
    "bert_generation": ("BertGeneration", _BERT),
    "big_bird": ("BigBird", _BERT),
    "biogpt": ("BioGpt", {}),
    "bitnet": ("BitNet", {}),
    "bloom": ("Bloom", {"n_head": 6, "hidden_size": 96}),
    "codegen": ("CodeGen", {"rotary_dim": 8}),
    "cohere": ("Cohere", {}),
    "cohere2": ("Cohere2", _WINDOWS),
    "ctrl": ("CTRL", {"dff": 96}),
    "cwm": ("Cwm", {}),
    "deepseek_v2": ("DeepseekV2", _LATENT | {"topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3", _LATENT),
    "diffllama": ("DiffLlama", {}),
    "dots1": ("Dots1", {}),
    "electra": ("Electra", _BERT),
    "ernie4_5": ("Ernie4_5", {}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {}),
    "exaone4": ("Exaone4", _WINDOWS),
    "falcon": ("Falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "flex_olmo": ("FlexOlmo", {}),
    "gemma": ("Gemma", {}),
    "gemma3n_text": ("Gemma3nText", _GEMMA | {"laurel_rank": 8}),
    "gemma4_text": ("Gemma4Text", _GEMMA | {"global_head_dim": 32, "head_dim": 16}),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "glm4_moe_lite": ("Glm4MoeLite", _LATENT),
    "gpt2": ("GPT2", {"tie_word_embeddings": True}),
    "gpt_bigcode": ("GPTBigCode", {}),
    "gpt_neo": ("GPTNeo", {"num_layers": 3, "num_heads": 4, "attention_types": _LOCAL, "window_size": 20}),
    "gpt_neox": ("GPTNeoX", {}),
    "gpt_neox_japanese": ("GPTNeoXJapanese", {}),
    "gptj": ("GPTJ", {"rotary_dim": 8}),
    "granitemoe": ("GraniteMoe", {"attention_multiplier": 0.3}),
    "granitemoeshared": ("GraniteMoeShared", {"shared_intermediate_size": 32}),
    "helium": ("Helium", {}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {}),
    "hyperclovax": ("HyperCLOVAX", {}),
    "jais2": ("Jais2", {}),
    "jetmoe": ("JetMoe", {"kv_channels": 16}),  # experts without transformers' interface for them
    "llama4_text": ("Llama4Text", _CHUNKS),
    "longcat_flash": ("LongcatFlash", _LONGCAT),
    "mbart": ("MBart", _BART),
    "mimo_v2_flash": ("MiMoV2Flash", {}),
    "minicpm3": ("MiniCPM3", _LATENT),
    "minimax_m2": ("MiniMaxM2", {}),
    "ministral": ("Ministral", {"sliding_window": 20}),
    "ministral3": ("Ministral3", {}),
    "modernbert_decoder": ("ModernBertDecoder", {"local_attention": 16}),
    "mpt": ("Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": 256}),
    "nanochat": ("NanoChat", {}),
    "nemotron": ("Nemotron", {}),
    "olmo": ("Olmo", {}),
    "olmo3": ("Olmo3", _WINDOWS),
    "olmoe": ("Olmoe", {}),
    "openai_gpt": ("OpenAIGPT", {}),
    "opt": ("OPT", {}),
    "persimmon": ("Persimmon", {}),
    "phi": ("Phi", {}),
    "phimoe": ("Phimoe", {}),
    "qwen2_moe": ("Qwen2Moe", {}),
    "rembert": ("RemBert", _BERT),
    "seed_oss": ("SeedOss", {}),
    "solar_open": ("SolarOpen", {}),
    "stablelm": ("StableLm", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 20}),
    "vaultgemma": ("VaultGemma", _WINDOWS | {"attn_logit_softcapping": 2.0}),
    "xglm": ("XGLM", {"d_model": 64, "num_layers": 3, "attention_heads": 4}),
    "youtu": ("Youtu", _LATENT),
}


def make_foreign_config(architecture: str, **changes: Any) -> transformers.PreTrainedConfig:
    """Return the configuration of a tiny model of ``architecture``."""
    name, settings = ARCHITECTURES[architecture]
    kind = getattr(transformers, f"{name}Config")
    defaults = kind()
    known = vars(defaults).keys() | kind.attribute_map.keys()
    sizes = {key: value for key, value in _SIZES.items() if key in known}
    config: transformers.PreTrainedConfig = kind(**sizes | settings | changes)
    return config


def make_foreign_checkpoint(directory: Path, architecture: str, **changes: Any) -> Path:
    """Write a checkpoint of ``architecture`` with random weights, and a tokenizer. Return its directory."""
    config = make_foreign_config(architecture, **changes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed=3)
    transformers.utils.logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    write_tokenizer(directory, "bytes")
    return directory
