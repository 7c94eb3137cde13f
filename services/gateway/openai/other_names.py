"""Names that other engines give to parameters of this server's.

A name of the same meaning is taken for this server's name. A name of a similar meaning is refused, and the error says
what to send instead: its values do not carry over.
"""

from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidRequest
from services.gateway.openai.body import Elsewhere

# The same meaning and the same values: SGLang's, llama.cpp's, Hugging Face's and Mistral's names.
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
# The original Tokasaurus' name.
SAME_IN_CHAT = {**SAME, "apply_chat_template_overrides": "chat_template_kwargs"}

_ITS_MEMBERS = Elsewhere("its members as parameters of their own", ({},))
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
    """Return the names of other engines that an endpoint refuses, with what it has instead.

    ``length`` limits an answer there, ``form`` holds it to a schema, ``prompt`` names the field of the prompt, and
    ``own`` are the endpoint's own entries, which take precedence.
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
    """Replace the other engines' names in ``document``. Return the names as given, by this server's name.

    Raises ``InvalidRequest`` if a parameter is there under two names with different values.
    """
    given: dict[str, str] = {}
    for name in [name for name in same if name in document]:
        value, ours = document.pop(name), same[name]
        if value is None:
            continue
        if document.get(ours) is not None and document[ours] != value:
            raise InvalidRequest(
                f"{name!r} is another name of {given.get(ours, ours)!r}, which is there with another value; send one"
                " of them",
                field=name,
                reason="INVALID_VALUE",
            )
        document[ours] = value
        given[ours] = name
    return given
