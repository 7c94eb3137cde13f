"""The expected answers of the fake worker: a function of the prompt, the seed and the sample's number."""

import json
from typing import Any

from bench.fuzz.findings import Wrong
from services.common.text.tokenizer import Tokenizer
from tests.fakes.model import FakeShape, continuation

EOS_EVERY = 60
_NOT_PLAIN = (b"response_format", b"structured_outputs", b"tool", b"guided", b"ignore_eos", b"min_tokens")


class Expected:
    """The expected answers with the built-in model's tokenizer."""

    def __init__(self, shape: FakeShape | None = None) -> None:
        self._shape = shape or FakeShape(eos_every=EOS_EVERY)
        self._tokenizer = Tokenizer.load("builtin")

    def tokens(self, prompt: list[int], count: int, **sampling: Any) -> list[int]:
        """Return the tokens of an answer, including an end-of-sequence token."""
        tokens = continuation(self._shape, prompt, count, **sampling)
        if self._shape.eos_every and self._shape.eos_token_id in tokens:
            tokens = tokens[: tokens.index(self._shape.eos_token_id) + 1]
        return tokens

    def text(self, tokens: list[int]) -> str:
        """Return ``tokens`` as text behind a prompt."""
        return self._tokenizer.vocabulary.text_bytes(tokens).decode(errors="replace")

    def check_whole(self, body: dict[str, Any], answer: Any) -> None:
        """Check a whole completion. Raises ``Wrong``."""
        choices = {choice["index"]: choice for choice in answer["choices"]}
        if sorted(choices) != list(range(body["n"])):
            raise Wrong("other text", f"choices {sorted(choices)}, expected {body['n']}")
        for index, choice in choices.items():
            self._check(body, index, choice["token_ids"], choice["text"], choice["finish_reason"])

    def check_stream(self, body: dict[str, Any], events: list[dict[str, Any]]) -> None:
        """Check a streamed completion. Raises ``Wrong``."""
        tokens: dict[int, list[int]] = {index: [] for index in range(body["n"])}
        texts, ends = dict.fromkeys(tokens, ""), dict.fromkeys(tokens)
        for event in events:
            for choice in event["choices"]:
                index = choice["index"]
                if index not in tokens or ends[index] is not None:
                    raise Wrong("other text", f"a piece of choice {index}, which is not there or over")
                tokens[index] += choice.get("token_ids") or []
                texts[index] += choice["text"]
                ends[index] = choice["finish_reason"]
        for index, said in tokens.items():
            self._check(body, index, said, texts[index], ends[index])

    def check_greedy(self, request: bytes, answer: dict[str, Any]) -> None:
        """Check the answer to any request, if the answer contains its prompt and the sampling is greedy."""
        if any(name in request for name in _NOT_PLAIN) or b'"temperature": 0,' not in request:
            return
        try:
            if json.loads(request.partition(b"\r\n\r\n")[2])["temperature"] != 0:
                return
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        for choice in answer["choices"]:
            prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            said = choice.get("token_ids")
            if prompt and said and said != self.tokens(prompt, len(said))[: len(said)]:
                raise Wrong("other text", f"choice {choice.get('index')}: {said} is no answer to {prompt}")

    def _check(self, body: dict[str, Any], index: int, said: list[int], text: str, end: str | None) -> None:
        prompt = body["prompt"]
        prompt = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        right = self.tokens(
            prompt, body["max_tokens"], seed=body["seed"], sample_index=index, temperature=body["temperature"]
        )
        stopped = right[-1] == self._shape.eos_token_id
        if said != right or end != ("stop" if stopped else "length"):
            raise Wrong("other text", f"choice {index}: {said}, {end}; expected {right}")
        if text != self.text(right[: -1 if stopped else None]):
            raise Wrong("other text", f"choice {index}: {text!r} for {right}")
