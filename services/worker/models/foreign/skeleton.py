"""A model of transformers without weights, from its config."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.common.boundaries import errors_to
from services.common.errors import InvalidRequest
from services.worker.models.foreign import attention, experts


def make_skeleton(config: Mapping[str, Any], architecture: str, dtype: torch.dtype) -> Any:
    """Return the model that ``config.json`` describes, in ``dtype``.

    Its parameters are on the device ``meta``, its buffers on the CPU. Raises ``InvalidRequest`` if transformers does
    not have the ``architecture``, or rejects the config.
    """
    attention.register()
    experts.register()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = config.get("model_type")
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind) != architecture:
        raise InvalidRequest(
            f"config.json: architectures={architecture!r} with model_type={kind!r} is not a language model that"
            f" transformers {transformers.__version__} has; choose another model",
            field="model",
        )
    errors: list[BaseException] = []
    # Architectures with a class for each attention function have none for the worker's. They use products instead.
    for attention_function in (attention.NAME, "eager"):
        errors.clear()
        with errors_to(errors.append), _without_memory():
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.CONFIG_MAPPING[kind].from_dict(dict(config)),
                dtype=dtype,
                trust_remote_code=False,
                attn_implementation=attention_function,
                experts_implementation=experts.NAME,
            )
        if not (errors and isinstance(errors[0], KeyError) and errors[0].args == (attention.NAME,)):
            break
    if errors:
        raise InvalidRequest(
            f"config.json: transformers {transformers.__version__} makes no {architecture} from it:"
            f" {first_line(errors[0])}; fetch the file again, or choose another model",
            field="model",
        ) from errors[0]
    _keep_precision(model, dtype)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = _skip_padding_search
    return model.eval().requires_grad_(False)


def first_line(error: BaseException) -> str:
    """Return the first line of the text of ``error``, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Move parameters that are made inside the context to the device ``meta``."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a parameter that several modules share stays one
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]  # it may return a parameter
    try:
        yield
    finally:
        hook.remove()


def _keep_precision(model: Any, dtype: torch.dtype) -> None:
    """Make the parameters float32 that the architecture wants to keep in it."""
    kept = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept += getattr(model, "_keep_in_fp32_modules", None) or ()
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if any(each in f"{module_name}.{name}" for each in kept):
                setattr(module, name, nn.Parameter(parameter.float(), requires_grad=False))


def _skip_padding_search(*_: Any) -> None:
    """Do nothing: a search for padding would block the host, and batches have no padding."""


def refuse(architecture: str, reason: str, cause: BaseException | None = None) -> NoReturn:
    """Raise ``InvalidRequest``: ``architecture`` cannot run through transformers because of ``reason``."""
    raise InvalidRequest(
        f"config.json: {architecture} cannot run through transformers (model_impl): {reason}; choose another model",
        field="model",
    ) from cause


def base_name_of(model: Any) -> str:
    """Return the attribute of ``model`` with the part before the vocabulary head, or "" if there is none."""
    if hasattr(model, model.base_model_prefix):
        name: str = model.base_model_prefix
        return name
    models = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return models[0] if len(models) == 1 else ""


def base_of(model: Any) -> nn.Module:
    """Return the part of ``model`` between token ids and the input of the vocabulary head."""
    name = base_name_of(model)
    base: nn.Module = getattr(model, name) if name else model
    return base


def inputs_of(token_ids: torch.Tensor, positions: torch.Tensor) -> Mapping[str, Any]:
    """Return the arguments of the base for the flattened ``token_ids`` and ``positions [tokens]`` int64."""
    return {"input_ids": token_ids[None], "position_ids": positions[None], "use_cache": False}
