"""The JSON of answers of ``POST /generate``."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.active_request import ActiveSample
from services.gateway.engine.codec import ModelFacts, SampleEnding
from services.gateway.engine.request import PromptRequest
from services.gateway.openai.logprobs import LOWEST, TokenText
from services.gateway.openai.shapes import CompletionShape
from services.gateway.openai.sse import DONE
from services.gateway.openai.transcript import Piece, TokenEntry


class Wanted(NamedTuple):
    """The parts of an answer that the caller wants."""

    in_list: bool  # the response is a list
    logprobs: bool
    prompt_logprobs_from: int | None  # position of the first scored prompt token; None: not wanted
    top_logprobs: int
    token_texts: bool  # beside log-probabilities
    trims_stops: bool  # the text ends before the stop string or stop token
    routed_experts_from: int


class _JsonList:
    """A JSON array that grows, so that a stream does not write its earlier entries again."""

    def __init__(self) -> None:
        self._written = bytearray()
        self.length = 0

    def extend(self, values: Sequence[Any]) -> None:
        """Append ``values``."""
        if values:
            self._written += (b"," if self.length else b"") + orjson.dumps(values)[1:-1]
            self.length += len(values)

    def fragment(self) -> orjson.Fragment:
        """Return the array for ``orjson.dumps``."""
        return orjson.Fragment(b"[%b]" % bytes(self._written))


@dataclass
class _SoFar:
    """The answer of one choice so far."""

    text: str = ""
    last_token: int = 0
    ids: _JsonList = field(default_factory=_JsonList)
    logprobs: _JsonList = field(default_factory=_JsonList)
    tops: _JsonList = field(default_factory=_JsonList)


class GenerateShape(CompletionShape):
    """The shape of ``/generate``: ``text``, ``output_ids`` and ``meta_info`` of each choice."""

    def __init__(
        self, request_id: str, facts: ModelFacts, token_text: TokenText, vocabulary: Vocabulary, wanted: Wanted
    ) -> None:
        """Create the shape. ``vocabulary`` is that of the text: with special tokens if the caller wants them."""
        super().__init__(request_id, facts, token_text)
        self._texts, self._vocabulary, self._wanted = token_text, vocabulary, wanted
        self._prompts: list[PromptRequest] = []  # by choice
        self._choices: dict[int, _SoFar] = {}

    def begin(self, prompts: Sequence[PromptRequest]) -> None:
        self._prompts = [prompt for prompt in prompts for _ in range(prompt.settings.n)]

    def choice(self, choice: ActiveSample, piece: Piece) -> bytes:
        return orjson.dumps(self._document(choice.index, piece._replace(ending=choice.outcome)))

    def whole(self, choices: Sequence[ActiveSample], written: Sequence[bytes]) -> bytes:
        return b"[%b]" % b",".join(written) if self._wanted.in_list else written[0]

    def chunk(self, index: int, piece: Piece, reason: str | None) -> bytes:
        return b"data: %b\n\n" % orjson.dumps(self._document(index, piece))

    def ending(self, choices: Sequence[ActiveSample]) -> bytes:
        return DONE

    def _document(self, index: int, piece: Piece) -> dict[str, Any]:
        """Return the answer of a choice so far, with its next ``piece``."""
        wanted, prompt, ending = self._wanted, self._prompts[index], piece.ending
        so_far = self._choices.setdefault(index, _SoFar())
        so_far.text += piece.text
        so_far.ids.extend(token_ids := piece.token_ids or [])
        so_far.last_token = token_ids[-1] if token_ids else so_far.last_token
        meta: dict[str, Any] = {
            "id": prompt.request_id,
            "finish_reason": None if ending is None else _finish_reason(ending, prompt),
            "prompt_tokens": len(prompt.prompt_ids),
            "completion_tokens": so_far.ids.length if ending is None else ending.completion_tokens,
        }
        if wanted.logprobs:
            meta |= self._output_logprobs(so_far, piece.entries)
        if wanted.prompt_logprobs_from is not None and piece.prompt_logprobs is not None:
            meta |= self._input_logprobs(prompt, wanted.prompt_logprobs_from, piece.prompt_logprobs)
        if ending is not None:
            del self._choices[index]
            meta |= _facts(ending)
        if piece.routed_experts is not None:
            meta["routed_experts"] = _as_int32(piece.routed_experts)
            meta["routed_experts_start_len"] = wanted.routed_experts_from
        document: dict[str, Any] = {"text": self._text(so_far, ending, prompt), "output_ids": so_far.ids.fragment()}
        document["meta_info"] = meta
        return document | {"index": index} if wanted.in_list else document

    def _text(self, so_far: _SoFar, ending: SampleEnding | None, prompt: PromptRequest) -> str:
        """Return the text, without the stop string or stop token that ended it if the caller wants neither."""
        if ending is None or ending.reason != "stop" or not self._wanted.trims_stops:
            return so_far.text
        if ending.stop_string is not None:
            return so_far.text.removesuffix(prompt.settings.stop_strings[ending.stop_string])
        if ending.stop_token is None:
            return so_far.text
        return so_far.text.removesuffix(self._vocabulary.text_bytes([so_far.last_token]).decode(errors="replace"))

    def _output_logprobs(self, so_far: _SoFar, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        scored = [(entry.token_id, entry.logprob) for entry in entries if entry.logprob is not None]
        so_far.logprobs.extend([self._scored(token, logprob.logprob) for token, logprob in scored])
        found: dict[str, Any] = {
            "output_token_logprobs": so_far.logprobs.fragment(),
            "output_token_logprobs_length": so_far.logprobs.length,
            "input_token_logprobs": [],
        }
        if self._wanted.top_logprobs:
            rows = ((logprob.top_ids, logprob.top_logprobs) for _, logprob in scored)
            so_far.tops.extend([[self._scored(*each) for each in zip(*row, strict=True)] for row in rows])
            found["output_top_logprobs"] = so_far.tops.fragment()
        return found

    def _input_logprobs(self, prompt: PromptRequest, start: int, scores: Sequence[Any]) -> dict[str, Any]:
        """Return the log-probabilities of prompt tokens. ``scores``: as ``prompt_logprobs`` returns them."""
        tokens, tops = prompt.prompt_ids[start:].tolist(), []
        chosen = [
            self._scored(token, None if entry is None else entry[str(token)]["logprob"])
            for token, entry in zip(tokens, scores, strict=True)
        ]
        for entry in scores if self._wanted.top_logprobs else ():
            ranked = sorted((each["rank"], int(token), each["logprob"]) for token, each in (entry or {}).items())
            best = [self._scored(token, value) for rank, token, value in ranked if rank <= self._wanted.top_logprobs]
            tops.append(best or None)
        return {"input_token_logprobs": chosen} | ({"input_top_logprobs": tops} if self._wanted.top_logprobs else {})

    def _scored(self, token: int, logprob: float | None) -> list[Any]:
        """Return ``[log-probability, token id, text or null]``."""
        text = self._texts(token)[0] if self._wanted.token_texts else None
        return [None if logprob is None else max(logprob, LOWEST), token, text]


def _finish_reason(ending: SampleEnding, prompt: PromptRequest) -> dict[str, Any]:
    if ending.reason == "length":
        return {"type": "length", "length": ending.completion_tokens}
    if ending.reason == "abort":
        return {"type": "abort", "message": "the request was aborted"}
    if ending.stop_string is not None:
        return {"type": "stop", "matched": prompt.settings.stop_strings[ending.stop_string]}
    return {"type": ending.reason, "matched": ending.stop_token}


def _facts(ending: SampleEnding) -> dict[str, Any]:
    """Return the members of ``meta_info`` of a choice that has ended."""
    weights = [{"version": version, "tokens": tokens} for version, tokens in ending.weights]
    return {
        "cached_tokens": ending.cached_tokens,
        "total_retractions": ending.preemptions,
        "weight_version": weights[-1]["version"] if weights else "",
        "weights": weights,
        "queue_time": ending.queued_s,
        "e2e_latency": ending.queued_s + ending.prefill_s + ending.decode_s,
    }


def _as_int32(experts: str) -> str:
    """Return routed experts, a NumPy file in Base64, as the bytes of an int32 array in Base64."""
    array = np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
    return base64.b64encode(array.astype("<i4").tobytes()).decode()
