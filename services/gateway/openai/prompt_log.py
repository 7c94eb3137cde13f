"""The log of prompts and answers, for the flag ``log_prompts``. No other log line has text of either."""

from collections.abc import Sequence

import structlog

from services.common.text.vocabulary import Vocabulary
from services.gateway.engine.request import PromptRequest

_MOST_CHARACTERS = 4096  # of a prompt, and of an answer
_MOST_TEXTS = 16  # prompts, and answers, of one request

log = structlog.get_logger(__name__)


class PromptLog:
    """Logs the prompts of one request at its beginning, and the beginnings of its answers at its end.

    Owned by an ``Answer``, and called in the thread that writes it.
    """

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._answers: dict[int, str] = {}

    def log_prompts(self, prompts: Sequence[PromptRequest], vocabulary: Vocabulary) -> None:
        """Log the prompts as the model gets them."""
        heads = [prompt.prompt_ids[: _MOST_CHARACTERS + 1] for prompt in prompts[:_MOST_TEXTS]]
        texts = [_cut(vocabulary.text_bytes(head).decode(errors="replace")) for head in heads]
        samples = prompts[0].settings.n if prompts else 0
        log.info("asked", request_id=self._request_id, prompts=texts, of=len(prompts), samples=samples)

    def add_text(self, index: int, text: str) -> None:
        """Add text of choice ``index``, as the model wrote it."""
        if index < _MOST_TEXTS and len(known := self._answers.get(index, "")) <= _MOST_CHARACTERS:
            self._answers[index] = (known + text)[: _MOST_CHARACTERS + 1]

    def log_answers(self) -> None:
        """Log the answers."""
        answers = [_cut(self._answers[index]) for index in sorted(self._answers)]
        log.info("answered", request_id=self._request_id, answers=answers)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
