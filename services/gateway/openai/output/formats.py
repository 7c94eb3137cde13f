"""The formats of a model's answers, set by flags or detected in its chat template."""

from collections.abc import Collection
from dataclasses import dataclass

from services.common.config import GatewayConfig
from services.common.text.thinking import ENDS, NO_THINKING_TOKENS, ThinkingTokens
from services.common.text.tokenizer import Tokenizer
from services.common.text.vocabulary import Vocabulary
from services.gateway.openai.output.calls import CALL_FORMATS, HERMES, LLAMA3, CallFormat, CallParser
from services.gateway.openai.output.channels import FINAL, ChannelParser
from services.gateway.openai.output.reader import OutputReader
from services.gateway.openai.output.reasoning import ReasoningParser, ReasoningTokens

# Marks of calls that are not JSON, in the formats of Qwen3-Coder and GLM-4.5.
_OTHER_CALLS = ("<function=", "<arg_key>")


@dataclass(frozen=True)
class OutputFormats:
    """The way in which a model writes tool calls and reasoning."""

    calls: CallFormat | None = None  # None: tool calls stay in the text
    calls_known: bool = True  # False: neither the flags nor the template say how it writes tool calls
    reasoning: bool = False  # an answer may begin with a reasoning section between ``<think>`` and ``</think>``
    channels: bool = False  # an answer consists of messages in channels, as those of gpt-oss
    thinking_tokens: ThinkingTokens = NO_THINKING_TOKENS  # of the reasoning section

    @property
    def has_reasoning(self) -> bool:
        """True if an answer may have reasoning, in any form."""
        return self.reasoning or self.channels

    @property
    def takes_thinking_budgets(self) -> bool:
        """True if the reasoning section can be ended at a token."""
        return self.reasoning and None not in self.thinking_tokens

    @classmethod
    def of(cls, config: GatewayConfig, tokenizer: Tokenizer) -> "OutputFormats":
        """Return the formats that the flags set. The flag value ``auto`` detects them in the chat template."""
        source = tokenizer.chat_template(tools=True).source if tokenizer.has_chat_template else ""
        calls, reasoning = CALL_FORMATS.get(config.tool_call_parser), config.reasoning_parser
        if config.tool_call_parser == "auto":
            calls = _detected(source)
        return cls(
            calls=calls,
            calls_known=calls is not None or config.tool_call_parser == "none",
            reasoning=reasoning == "qwen3" or (reasoning == "auto" and ENDS in source),
            channels=reasoning == "gpt_oss" or (reasoning == "auto" and FINAL in source),
            thinking_tokens=ThinkingTokens.of(tokenizer),
        )

    def reader(
        self,
        vocabulary: Vocabulary,
        *,
        tools: Collection[str],
        parallel: bool,
        thinking_opened: bool,
        named: bool = False,
    ) -> OutputReader | None:
        """Return the reader of one answer, or None if all its text is content.

        ``thinking_opened``: the prompt has opened the reasoning section. ``named``: the caller demands a call of one
        tool.
        """
        calls = CallParser(self.calls, tools) if self.calls is not None and tools else None
        if self.channels:
            tokens = ReasoningTokens(vocabulary, FINAL)
            return OutputReader(ChannelParser(), calls, parallel=parallel, named=named, tokens=tokens)
        if not self.reasoning:
            return OutputReader(None, calls, parallel=parallel, named=named) if calls is not None else None
        reasoning = ReasoningParser(opened=thinking_opened)
        return OutputReader(reasoning, calls, parallel=parallel, named=named, tokens=ReasoningTokens(vocabulary))


def _detected(template: str) -> CallFormat | None:
    if any(mark in template for mark in _OTHER_CALLS):
        return None
    if HERMES.begins[0] in template:
        return HERMES
    llama = LLAMA3.begins[0] in template or ("ipython" in template and '"parameters"' in template)
    return LLAMA3 if llama else None
