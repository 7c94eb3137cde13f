"""Prompts and answers in the log, for who asks for them: otherwise a log shows nothing of either."""

from collections.abc import Sequence

import structlog

from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.request import PromptRequest

_MOST_CHARACTERS = 4096  # of a prompt, and of an answer
_MOST_TEXTS = 16  # prompts, and answers, of one request

log = structlog.get_logger(__name__)


class PromptLog:
    """One request's, of which it keeps the beginnings of the answers. Owned by its ``Answer``, and called by whatever
    thread writes that."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._answers: dict[int, str] = {}

    def asked(self, jobs: Sequence[PromptRequest], vocabulary: Vocabulary) -> None:
        """Its prompts, as the model sees them."""
        heads = [job.prompt_ids[: _MOST_CHARACTERS + 1] for job in jobs[:_MOST_TEXTS]]
        prompts = [_cut(vocabulary.text_bytes(head).decode(errors="replace")) for head in heads]
        samples = jobs[0].settings.n if jobs else 0
        log.info("asked", request_id=self._request_id, prompts=prompts, of=len(jobs), samples=samples)

    def answered(self, index: int, text: str) -> None:
        """More of the answer of choice ``index``, as the model wrote it."""
        if index < _MOST_TEXTS and len(known := self._answers.get(index, "")) <= _MOST_CHARACTERS:
            self._answers[index] = (known + text)[: _MOST_CHARACTERS + 1]

    def ended(self) -> None:
        """Nothing comes any more."""
        answers = [_cut(self._answers[index]) for index in sorted(self._answers)]
        log.info("answered", request_id=self._request_id, answers=answers)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
