"""The body of ``POST /generate``, translated to a completion."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import Field, PlainValidator, model_validator

from services.common.errors import UnsupportedParameter
from services.common.json_scan import Bulk
from services.common.logprobs_mode import PROCESSED
from services.common.request_bounds import MAX_STOP_TOKENS
from services.gateway.openai.body import Body, Elsewhere, optional
from services.gateway.openai.fields import MAX_PROMPTS, Bias, Stops, TokenId, as_prompts, in_range
from services.gateway.openai.grammar.body import Text
from services.gateway.openai.json_value import Schema
from services.gateway.openai.parse import validate
from services.gateway.openai.schemas import CompletionBody
from services.gateway.openai.unsupported import refuse_unsupported

RequestId = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[!-~]+$")]

# Names in a completion of the parameters of ``sampling_params``, if they differ.
COMPLETION_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "json_schema": "guided_json",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}
_NOT_IN_A_COMPLETION = ("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")


def _as_texts(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("expected a string, or a list of strings")
    if len(texts) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(texts)}")
    return texts


def _as_ids(value: Any) -> list[np.ndarray]:
    prompts: list[np.ndarray] = as_prompts(value)
    if isinstance(prompts[0], str):
        raise ValueError("expected a list of token ids, or a list of lists of token ids; send texts as 'text'")
    return prompts


Texts = Annotated[list[str], PlainValidator(_as_texts, json_schema_input_type=str | list[str])]
Ids = Annotated[list[np.ndarray], PlainValidator(_as_ids, json_schema_input_type=list[int] | list[list[int]])]


class GenerateSampling(Body):
    """``sampling_params`` of ``POST /generate``. The defaults are SGLang's, and not those of the model."""

    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        ours: Elsewhere(theirs) for theirs, ours in COMPLETION_NAMES.items()
    }

    max_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = Field(
        default=128,
        description="Maximum number of tokens in an answer. null: the rest of the context. 0 only computes"
        " log-probabilities of the prompt.",
    )
    n: Annotated[int, Field(ge=1)] | None = Field(default=1, description="Number of samples per prompt.")
    temperature: Annotated[float, in_range("temperature")] | None = Field(
        default=1.0, description="0 selects the most likely token."
    )
    top_p: Annotated[float, in_range("top_p")] | None = Field(default=1.0, description="1 turns it off.")
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = Field(default=-1, description="-1 turns it off.")
    min_p: Annotated[float, in_range("min_p")] | None = Field(default=0.0, description="0 turns it off.")
    frequency_penalty: Annotated[float, in_range("frequency_penalty")] | None = optional("Default: 0, which is off.")
    presence_penalty: Annotated[float, in_range("presence_penalty")] | None = optional("Default: 0, which is off.")
    repetition_penalty: Annotated[float, in_range("repetition_penalty")] | None = Field(
        default=1.0, description="1 turns it off."
    )
    min_new_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Number of tokens before which the answer cannot end."
    )
    stop: Stops = Field(default=(), description="At most 16 stop strings of at most 4,096 bytes.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = optional(
        "Tokens that end the answer, in addition to the model's end tokens."
    )
    ignore_eos: bool | None = optional("true: the model's end tokens do not end the answer.")
    no_stop_trim: bool | None = optional("true: the text includes the stop string or stop token that ended it.")
    skip_special_tokens: bool | None = optional("false: special tokens appear in the text by name.")
    spaces_between_special_tokens: bool | None = optional("Accepted: no spaces are ever added.")
    logit_bias: Bias | None = optional("Values that are added to the logits of tokens, by token id.")
    sampling_seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = optional(
        "The same seed gives the same samples."
    )
    json_schema: Schema | Text | None = optional("A JSON Schema of the answer, as text or as an object.")
    regex: Text | None = optional("A regular expression for the whole answer.")
    ebnf: Text | None = optional("A grammar for the whole answer.")

    @model_validator(mode="before")
    @classmethod
    def _only_supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            try:
                refuse_unsupported(given, cls)
            except UnsupportedParameter as error:
                error.field = f"sampling_params.{error.field}"
                raise
            # SGLang gives null the meaning of a parameter that is left out, except for the length.
            return {name: value for name, value in given.items() if value is not None or name == "max_new_tokens"}
        return given

    def as_completion(self) -> dict[str, Any]:
        """Return the parameters of a completion, without a length that the client did not ask for."""
        given = {name: getattr(self, name) for name in type(self).model_fields if name not in _NOT_IN_A_COMPLETION}
        if "max_new_tokens" not in self.model_fields_set:
            del given["max_new_tokens"]
        return {COMPLETION_NAMES.get(name, name): value for name, value in given.items() if value is not None}


_IN_SAMPLING = {name: Elsewhere(f"sampling_params.{name}") for name in GenerateSampling.model_fields}


class GenerateBody(Body):
    """``POST /generate``, as SGLang has it."""

    bulks: ClassVar[Mapping[str, Bulk]] = {"input_ids": Bulk()}
    nested: ClassVar[tuple[str, ...]] = ("sampling_params",)
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        **_IN_SAMPLING,
        "audio_data": Elsewhere("", ([],)),
        "background": Elsewhere("", (False,)),
        "bootstrap_host": Elsewhere(),
        "bootstrap_room": Elsewhere(),
        "data_parallel_rank": Elsewhere(),
        "extra_key": Elsewhere("cache_salt"),
        "image_data": Elsewhere("", ([],)),
        "input_embeds": Elsewhere(),
        "logprobs": Elsewhere("return_logprob"),
        "priority": Elsewhere(),
        "prompt": Elsewhere("text or input_ids"),
        "return_entropy": Elsewhere("", (False,)),
        "return_flat_raw_top_logprobs": Elsewhere("", (False,)),
        "return_prompt_token_ids": Elsewhere("", (False,)),
        "return_sampling_mask": Elsewhere("", (False,)),
        "routed_dp_rank": Elsewhere(),
        "token_ids_logprob": Elsewhere("", ([],)),
        "video_data": Elsewhere("", ([],)),
    }

    text: Texts | None = optional("A prompt, or a list of prompts. Send either text or input_ids.")
    input_ids: Ids | None = optional("A prompt as token ids, or a list of prompts.")
    sampling_params: GenerateSampling = Field(
        default_factory=GenerateSampling, description="How to sample. One object for all prompts."
    )
    rid: RequestId | Annotated[list[RequestId], Field(max_length=MAX_PROMPTS)] | None = optional(
        "Id of the request, for /abort_request: visible ASCII characters. A list has one id for each prompt."
    )
    stream: bool = Field(
        default=False, description="true: send server-sent events. Each has the whole answer so far, as in SGLang."
    )
    return_logprob: bool = Field(default=False, description="true: return log-probabilities.")
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] = Field(
        default=-1,
        description="Position of the first prompt token whose log-probability is returned. -1: none. Not with stream.",
    )
    top_logprobs_num: Annotated[int, Field(ge=0)] = Field(default=0, description="Number of alternatives, at most 20.")
    return_text_in_logprobs: bool = Field(default=False, description="true: log-probabilities have the tokens' texts.")
    return_routed_experts: bool = Field(
        default=False, description="true: meta_info.routed_experts has the experts of each token, int32 in Base64."
    )
    routed_experts_start_len: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="Position of the first token in routed_experts."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = optional(
        "Cached prefixes are shared only with requests that have the same salt."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _parameters_suit_each_other(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise ValueError("input_ids: send either text or input_ids")
        prompts = len(self.prompts)
        if isinstance(self.rid, list) and len(self.rid) != prompts:
            raise ValueError(f"rid: {len(self.rid)} ids for {prompts} prompts; send one for each prompt")
        if not self.return_logprob:
            self._refuse_logprobs()
        if self.stream and self.scores_prompt:
            raise ValueError("logprob_start_len: not with stream; leave one of them out")
        if self.sampling_params.max_new_tokens == 0 and not self.scores_prompt:
            raise ValueError(
                "sampling_params.max_new_tokens: 0 is only allowed with return_logprob and logprob_start_len of 0 or"
                " more; ask for at least 1"
            )
        return self

    def _refuse_logprobs(self) -> None:
        given = {
            "top_logprobs_num": self.top_logprobs_num > 0,
            "logprob_start_len": self.logprob_start_len >= 0,
            "return_text_in_logprobs": self.return_text_in_logprobs,
        }
        for name in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{name}: only allowed with return_logprob; send both, or leave it out")

    @property
    def prompts(self) -> list[str] | list[np.ndarray]:
        """The prompts, as texts or as token ids (uint32)."""
        return self.text if self.text is not None else self.input_ids or []

    @property
    def is_list(self) -> bool:
        """True if the response is a list: for several prompts or samples."""
        return len(self.prompts) > 1 or (self.sampling_params.n or 1) > 1

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of the prompt are wanted."""
        return self.return_logprob and self.logprob_start_len >= 0

    def completion(self) -> CompletionBody:
        """Return the completion with the same meaning.

        Stop strings and stop tokens are kept in its text and removed later, because their log-probabilities are wanted.
        """
        fields = self.sampling_params.as_completion() | {
            "prompt": self.prompts,
            "stream": self.stream,
            "include_stop_str_in_output": True,
            "return_token_ids": True,
            "return_routed_experts": self.return_routed_experts,
            "routed_experts_prompt_start": self.routed_experts_start_len,
            "cache_salt": self.cache_salt,
        }
        if self.return_logprob:
            fields |= {"logprobs": self.top_logprobs_num, "logprobs_mode": PROCESSED}
        if self.scores_prompt:
            fields |= {"prompt_logprobs": self.top_logprobs_num, "prompt_logprobs_start": self.logprob_start_len}
        return validate(fields, CompletionBody)
