"""The bodies of OpenAI requests, with the types and ranges that this server accepts.

A parameter that is neither a field here nor in ``unsupported`` is unknown. It is stored in ``model_extra``.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from services.common.json_scan import Bulk
from services.common.logprobs_mode import LogprobsMode
from services.common.request_bounds import MAX_BIASES, MAX_STOP_TOKENS
from services.gateway.openai.body import Body, Elsewhere, optional
from services.gateway.openai.fields import (
    Bias,
    KeptTokens,
    Metadata,
    ModelName,
    Prompts,
    Stops,
    Timeout,
    TokenId,
    in_range,
)
from services.gateway.openai.grammar.body import GrammarBody
from services.gateway.openai.messages import AllowedTools, ConversationBody, ReasoningEffort, Tool, ToolChoice
from services.gateway.openai.unsupported import SAME, SAME_IN_CHAT, SIMILAR, SIMILAR_IN_CHAT


class StreamOptions(Body):
    """Options of a stream."""

    include_usage: bool | None = optional("true: the last chunk has the usage.")
    continuous_usage_stats: bool | None = optional(
        "true: every chunk has the usage of its choice so far. Not allowed with include_usage=false."
    )
    include_obfuscation: bool | None = optional("Accepted: no padding is ever added.")

    @model_validator(mode="after")
    def _usage_is_wanted(self) -> "StreamOptions":
        if self.continuous_usage_stats and self.include_usage is False:
            raise ValueError("continuous_usage_stats needs usage; leave include_usage out, or set it to true")
        return self


class SamplingBody(Body):
    """The fields of every body that asks for an answer."""

    bulks: ClassVar[Mapping[str, Bulk]] = {"logit_bias": Bulk(MAX_BIASES)}

    model: ModelName = None
    stream: bool | None = optional("true: send server-sent events, with data: [DONE] as the last one.")
    temperature: Annotated[float, in_range("temperature")] | None = optional(
        "0 selects the most likely token. Default: the model's generation_config.json, else 1."
    )
    top_p: Annotated[float, in_range("top_p")] | None = optional(
        "1 turns it off. Default: the model's generation_config.json, else 1."
    )
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = optional(
        "0 and -1 turn it off. Default: the model's generation_config.json, else off."
    )
    min_p: Annotated[float, in_range("min_p")] | None = optional(
        "0 turns it off. Default: the model's generation_config.json, else off."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = optional(
        "The same seed gives the same samples, whatever else runs. Samples of one request differ."
    )
    stop: Stops = Field(
        default=(), description="At most 16 stop strings of at most 4,096 bytes. The answer ends before the first one."
    )
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS)] | None = optional(
        "Tokens that end the answer, in addition to the model's end tokens."
    )
    ignore_eos: bool | None = optional("true: the model's end tokens do not end the answer.")
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Number of tokens before which the answer cannot end."
    )
    logit_bias: Bias | None = optional("Values that are added to the logits of tokens, by token id.")
    frequency_penalty: Annotated[float, in_range("frequency_penalty")] | None = optional(
        "Penalty for each time that the answer already has the token. 0 turns it off."
    )
    presence_penalty: Annotated[float, in_range("presence_penalty")] | None = optional(
        "Penalty if the answer already has the token. 0 turns it off."
    )
    repetition_penalty: Annotated[float, in_range("repetition_penalty")] | None = optional(
        "Penalty for tokens of the prompt and of the answer so far. 1 turns it off."
        " Default: the model's generation_config.json, else off."
    )
    logprobs_mode: LogprobsMode | None = optional(
        "raw: log-probabilities of the model's distribution. processed: of the distribution that tokens are drawn from."
    )
    thinking_token_budget: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Maximum number of tokens in the reasoning section. The section is then ended, and the answer continues."
    )
    priority: int | None = optional(
        "0 is normal. Requests with a lower value run first, requests with a higher value last."
    )
    cache_salt: Annotated[str, Field(max_length=256)] | None = optional(
        "Cached prefixes are shared only with requests that have the same salt."
    )
    timeout: Timeout | None = optional(
        "Seconds that the request may take, queueing included. The request then fails with 504."
    )
    # Metadata for OpenAI's own services. It is validated as OpenAI does.
    user: str | None = optional("Accepted without effect.")
    metadata: Metadata | None = optional("Accepted without effect.")
    store: bool | None = optional("Accepted without effect.")


class GenerationBody(GrammarBody, SamplingBody):
    """The fields that completions and chat completions share."""

    nested: ClassVar[tuple[str, ...]] = ("stream_options", "response_format", "structured_outputs")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = SIMILAR
    other_names: ClassVar[Mapping[str, str]] = SAME

    n: Annotated[int, Field(ge=1)] | None = optional("Number of samples per prompt. The prompt is computed once.")
    end_stragglers_after: Annotated[int, Field(ge=1)] | None = optional(
        "When this number of a prompt's samples, at most n, has finished, the others end with finish_reason abort."
    )
    park_stragglers_after: Annotated[int, Field(ge=1)] | None = optional(
        "When this number of a prompt's samples, at most n, has finished, the others continue only in slots and pages"
        " that no other request needs."
    )
    stream_options: StreamOptions | None = optional("Only allowed with stream.")
    max_tokens: Annotated[int, Field(ge=1)] | None = optional(
        "Maximum number of tokens in an answer. Default: the model's generation_config.json, else the"
        " rest of the context."
    )
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = optional(
        "OpenAI's newer name of max_tokens. It takes precedence over max_tokens."
    )
    include_stop_str_in_output: bool | None = optional(
        "true: the answer includes the stop string or stop token that ended it."
    )
    skip_special_tokens: bool | None = optional(
        "false: special tokens appear in the text by name. Not allowed with stop."
    )
    return_token_ids: bool | None = optional("true: return token_ids in each choice, and prompt_token_ids.")
    return_tokens_as_token_ids: bool | None = optional(
        "true: tokens in logprobs are written as token_id:ID instead of their texts."
    )
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "Return the log-probabilities of the prompt's tokens, with this number of alternatives."
        " Not allowed with stream."
    )
    prompt_logprobs_start: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Position of the first prompt token in prompt_logprobs. Cached prefixes before it are not computed again."
    )
    return_routed_experts: bool | None = optional(
        "true: return routed_experts in each choice: the experts that computed each token, as a NumPy file in Base64."
    )
    routed_experts_prompt_start: Annotated[int, Field(ge=0, lt=2**31)] | None = optional(
        "Position of the first token in routed_experts, at most the length of the prompt."
    )
    logprobs_in_fingerprint: bool | None = optional(
        "true: return log-probabilities, packed, in system_fingerprint. Not allowed with stream or echo."
    )
    truncate_prompt_tokens: KeptTokens | None = optional(
        "Maximum number of prompt tokens to keep. -1 keeps what the context has room for."
    )
    truncation_side: Literal["left", "right"] | None = optional(
        "Side on which a longer prompt is truncated. Default: left."
    )

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens of each answer that the client asks for, or None."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def samples(self) -> int:
        """Number of samples to generate for each prompt."""
        return self.n or 1

    answer_top_field: ClassVar[str] = "logprobs"  # the parameter that ``answer_top`` comes from

    @property
    def answer_top(self) -> int | None:
        """Number of alternatives for each token of the answer, or None if there are no log-probabilities."""
        return None

    @property
    def prompt_top(self) -> int | None:
        """Number of alternatives to score for each prompt token, or None if prompt tokens are not scored."""
        return self.prompt_logprobs

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with its usage."""
        return self.stream_options is not None and bool(
            self.stream_options.include_usage or self.stream_options.continuous_usage_stats
        )

    @property
    def wants_running_usage(self) -> bool:
        """True if every chunk of a stream has the usage of its choice so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @model_validator(mode="after")
    def _numbers_of_stragglers_are_possible(self) -> "GenerationBody":
        end, park = self.end_stragglers_after, self.park_stragglers_after
        for name, after in (("end_stragglers_after", end), ("park_stragglers_after", park)):
            if (after or 0) > self.samples:
                raise ValueError(f"{name}: expected at most n={self.samples}, the number of samples of a prompt")
        if end is not None and park is not None and park >= end:
            raise ValueError(
                f"park_stragglers_after: expected less than end_stragglers_after={end}, because samples that have ended"
                " cannot be parked; lower it, or leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _parameters_suit_each_other(self) -> "GenerationBody":
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not with stream; leave one of them out")
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError("prompt_logprobs_start: only allowed with prompt_logprobs; send both, or leave it out")
        if self.routed_experts_prompt_start and not self.return_routed_experts:
            raise ValueError(
                "routed_experts_prompt_start: only allowed with return_routed_experts; send both, or leave it out"
            )
        if self.logprobs_in_fingerprint and self.stream:
            raise ValueError(
                "logprobs_in_fingerprint: not with stream, whose fingerprint comes first; leave one of them out"
            )
        if self.skip_special_tokens is False and self.stop:
            raise ValueError(
                "skip_special_tokens: false does not go with stop, which is looked for in the text without special"
                " tokens; leave one of them out, or use stop_token_ids"
            )
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        return self


class CompletionBody(GenerationBody):
    """``POST /v1/completions``."""

    bulks: ClassVar[Mapping[str, Bulk]] = {**SamplingBody.bulks, "prompt": Bulk()}

    prompt: Prompts = Field(
        description="A text, a list of texts, a list of token ids, or a list of lists of token ids."
    )
    logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "Return the log-probabilities of the answer's tokens, with this number of alternatives, at most 20."
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = optional(
        "Maximum number of tokens in an answer. Default: 16. 0 is only allowed with echo or prompt_logprobs."
    )
    echo: bool | None = optional(
        "true: return the prompt before the answer, with its log-probabilities if logprobs asks for them."
    )
    best_of: Annotated[int, Field(ge=1)] | None = optional(
        "Number of samples to generate. The n most likely ones are returned, by mean log-probability."
        " Not allowed with stream."
    )
    add_special_tokens: bool | None = optional("false: add no special tokens, such as BOS, to a text.")

    @property
    def samples(self) -> int:
        return self.best_of or self.n or 1

    @property
    def answer_top(self) -> int | None:
        return self.logprobs

    @property
    def prompt_top(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((top for top in (echoed, self.prompt_logprobs) if top is not None), default=None)

    @model_validator(mode="after")
    def _prompt_parameters_suit_each_other(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of: expected at least n={self.n}, the number of samples to return")
        if self.end_stragglers_after is not None and self.samples > (self.n or 1):
            raise ValueError(
                "end_stragglers_after: not with best_of, which compares whole answers; leave one of them out"
            )
        if self.best_of is not None and self.stream:
            raise ValueError("best_of: not with stream, which cannot wait for the best; leave one of them out")
        if self.prompt_logprobs_start and self.echo and self.logprobs is not None:
            raise ValueError(
                "prompt_logprobs_start: not with echo and logprobs, which return the log-probabilities of the whole"
                " prompt; leave one of them out"
            )
        if self.logprobs_in_fingerprint and self.echo:
            raise ValueError(
                "logprobs_in_fingerprint: not with echo, since it has only the log-probabilities of the answer; leave"
                " one of them out, or ask for prompt_logprobs"
            )
        if self.most_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 is only allowed with echo or prompt_logprobs; ask for at least 1")
        return self


class ChatBody(ConversationBody, GenerationBody):
    """``POST /v1/chat/completions``."""

    nested = (*GenerationBody.nested, "messages", "tools")
    elsewhere: ClassVar[Mapping[str, Elsewhere]] = {
        **SIMILAR_IN_CHAT,
        "include": Elsewhere("logprobs", ([],)),
        "instructions": Elsewhere("a message of the role 'system'"),
        "previous_response_id": Elsewhere("the whole conversation as messages"),
        "reasoning": Elsewhere("reasoning_effort", ({},)),
        "text": Elsewhere("response_format", ({},)),
    }
    other_names = SAME_IN_CHAT

    metadata: Metadata | None = optional("Stored with the chat completion if store is true.")
    store: bool | None = optional("true: store the chat completion for 30 days.")
    logprobs: bool | None = optional("true: return the log-probabilities of the answer's tokens.")
    top_logprobs: Annotated[int, Field(ge=0)] | None = optional("Number of alternatives for each token, at most 20.")
    tool_choice: ToolChoice | None = optional("none, auto, required, or one of the tools.")
    parallel_tool_calls: bool | None = optional("false: allow at most one call.")
    reasoning_effort: ReasoningEffort | None = optional(
        "For chat templates with reasoning_effort or enable_thinking."
        " none turns thinking off, all other values turn it on."
    )

    answer_top_field = "top_logprobs"

    @property
    def effort(self) -> ReasoningEffort | None:
        return self.reasoning_effort

    @property
    def shown_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else super().shown_tools

    @property
    def answer_top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only allowed when logprobs is true")
        return self

    @model_validator(mode="after")
    def _only_allowed_tools(self) -> "ChatBody":
        """Replace ``allowed_tools`` by its mode, and remove the tools that it does not name."""
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            if missing := names - {tool.function.name for tool in self.tools or ()}:
                raise ValueError(f"tool_choice: there is no tool {min(missing)[:64]!r} among tools")
            self.tools = [tool for tool in self.tools or () if tool.function.name in names]
            self.tool_choice, self._only_allowed = allowed.mode, True
        return self
