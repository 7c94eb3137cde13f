"""Parameters of this server that other engines know by other names.

A name with the same meaning and the same values is accepted. A name with a similar meaning is rejected, and the error
says which parameter to send instead.
"""

from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidValue
from services.gateway.openai.body import Elsewhere

# Names with the same meaning and values, of SGLang, llama.cpp, Hugging Face and Mistral.
SAME = {
    "ebnf": "guided_grammar",
    "grammar": "guided_grammar",
    "json_schema": "guided_json",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "random_seed": "seed",
    "regex": "guided_regex",
    "stop_sequences": "stop",
    "truncate": "truncate_prompt_tokens",
}
# With a name of the original Tokasaurus.
SAME_IN_CHAT = {**SAME, "apply_chat_template_overrides": "chat_template_kwargs"}

_ITS_MEMBERS = Elsewhere("its members as parameters", ({},))
_LOGPROBS, _LENGTH = "logprobs", "max_tokens"
SIMILAR = {
    "decoder_input_details": Elsewhere("prompt_logprobs", (False,)),
    "details": Elsewhere(_LOGPROBS, (False,)),
    "do_sample": Elsewhere("temperature=0 for the most likely tokens", (True,)),
    "format": Elsewhere("response_format"),
    "input_ids": Elsewhere("prompt with token ids"),
    "inputs": Elsewhere("prompt"),
    "max_length": Elsewhere(_LENGTH),
    "max_output_tokens": Elsewhere(_LENGTH),
    "n_predict": Elsewhere(_LENGTH, (-1,)),
    "n_probs": Elsewhere(_LOGPROBS, (0,)),
    "num_predict": Elsewhere(_LENGTH, (-1,)),
    "num_return_sequences": Elsewhere("n", (1,)),
    "options": _ITS_MEMBERS,
    "parameters": _ITS_MEMBERS,
    "repeat_penalty": Elsewhere("repetition_penalty", (1,)),
    "return_full_text": Elsewhere("echo", (False,)),
    "return_logprob": Elsewhere(_LOGPROBS, (False,)),
    "sampling_params": _ITS_MEMBERS,
    "top_logprobs_num": Elsewhere(_LOGPROBS, (0,)),
    "top_n_tokens": Elsewhere(_LOGPROBS, (0,)),
}
SIMILAR_IN_CHAT = {
    **SIMILAR,
    "enable_thinking": Elsewhere("chat_template_kwargs={'enable_thinking': ...}"),
    "input_ids": Elsewhere("messages"),
    "inputs": Elsewhere("messages"),
    "return_full_text": Elsewhere("a completion with echo", (False,)),
    "think": Elsewhere("reasoning_effort"),
    "thinking": Elsewhere("reasoning_effort"),
}


def refused_names(
    length: Elsewhere, form: Elsewhere, prompt: str, own: Mapping[str, Elsewhere]
) -> dict[str, Elsewhere]:
    """Return the names of other engines that an endpoint rejects, with the parameters to send instead.

    ``length``: the parameter that limits an answer. ``form``: the parameter that sets its schema. ``prompt``: name of
    the parameter for the prompt. ``own``: further entries, which take precedence.
    """
    lengths = ("max_length", "max_new_tokens", "n_predict", "num_predict")
    forms = ("ebnf", "format", "grammar", "json_schema", "regex")
    same = {name: Elsewhere(ours) for name, ours in SAME.items()}
    return {
        **SIMILAR_IN_CHAT,
        **same,
        **dict.fromkeys(lengths, length),
        **dict.fromkeys(forms, form),
        **dict.fromkeys(("input_ids", "inputs"), Elsewhere(prompt)),
        **own,
    }


def rename(document: dict[str, Any], same: Mapping[str, str]) -> dict[str, str]:
    """Replace other engines' names in ``document``. Return the names that were replaced, by this server's name.

    Raises ``InvalidRequest`` if a parameter has different values under two names.
    """
    given: dict[str, str] = {}
    for name in [name for name in same if name in document]:
        value, ours = document.pop(name), same[name]
        if value is None:
            continue
        if document.get(ours) is not None and document[ours] != value:
            raise InvalidValue(
                f"{name!r} is another name of {given.get(ours, ours)!r}, which has another value; send one of them",
                field=name,
            )
        document[ours] = value
        given[ours] = name
    return given
