"""Restores a sample that another scheduler started: its state, or its finish."""

from services.common.errors import InvalidRequest
from services.scheduler.api.model import ServedModel
from services.scheduler.core.request import Finish, FinishReason, Request
from services.scheduler.core.stopping.automaton import Automaton
from tokasaurus.scheduler.v1 import generate_pb2


def read_resume(request: Request, message: generate_pb2.GenerateRequest, model: ServedModel) -> None:
    """Set the fields of ``request`` that ``message.resume`` determines. Raises ``InvalidRequest`` naming the field."""
    generated, first = message.resume.generated_tokens, message.resume.sample_index
    if message.WhichOneof("prompt") != "tokens":
        raise InvalidRequest("resume needs a prompt of token ids: set tokens", field="resume")
    if request.n != 1 and generated:
        raise InvalidRequest(f"resume continues one sample and n is {request.n}: expected 1", field="n")
    if first + request.n > 2**32:
        raise InvalidRequest(f"sample {first} and n={request.n} are beyond 32 bits", field="resume.sample_index")
    if generated >= len(request.tokens):
        raise InvalidRequest(
            f"generated_tokens is {generated} and the prompt has {len(request.tokens)} tokens: at least one must"
            " belong to the original prompt",
            field="resume.generated_tokens",
        )
    if request.max_tokens is not None and generated > request.max_tokens:
        raise InvalidRequest(
            f"generated_tokens is {generated} and max_tokens {request.max_tokens}: the sample has already finished",
            field="resume.generated_tokens",
        )
    if request.sampling.grammar and generated:
        _check_end(request.tokens[-generated:-1].tolist(), model)
    request.resumed_tokens, request.first_sample_index = generated, first
    if request.automaton is not None and generated:
        before, last = _last_bytes(request, request.automaton, model)
        request.stop_state = request.automaton.run(request.automaton.run(0, before), last)


def _check_end(generated: list[int], model: ServedModel) -> None:
    """Refuse an EOS token before the last generated token. The worker finds other tokens that the grammar forbids."""
    ends = set(model.card.eos_token_ids)
    if (end := next((token for token in generated if token in ends), None)) is not None:
        raise InvalidRequest(
            f"token {end} ends a sequence, but generated_tokens has tokens after it, which no grammar allows",
            field="resume.generated_tokens",
        )


def finish_of(request: Request, model: ServedModel) -> Finish | None:
    """Return the finish of a sample whose last token is its last, or None if it continues.

    The other scheduler sent this token, but was lost before it sent the finish.
    """
    generated = request.resumed_tokens
    if not generated:
        return None
    if request.max_tokens is not None:
        limit = request.prompt_tokens + request.max_tokens
    else:
        limit = min(model.shape.max_context_tokens, model.shape.pool_tokens + 1)
    stop_token_id: int | None = None
    stop_string: tuple[int, int] | None = None
    reason = FinishReason.LENGTH if len(request.tokens) >= limit else None
    if generated >= request.min_tokens:
        last = int(request.tokens[-1])
        if last in request.stop_token_ids:
            reason, stop_token_id = FinishReason.STOP, last
        elif (stop_string := _match(request, model)) is not None:
            reason = FinishReason.STOP
    if reason is None:
        return None
    return Finish(
        request.handle, reason, request.prompt_tokens, generated, stop_token_id=stop_token_id, stop_string=stop_string
    )


def _match(request: Request, model: ServedModel) -> tuple[int, int] | None:
    """Return the stop string that ends in the last token, and the bytes at the end of the text outside the answer."""
    if request.automaton is None:
        return None
    before, last = _last_bytes(request, request.automaton, model)
    return request.automaton.first_match(request.automaton.run(0, before), last)


def _last_bytes(request: Request, automaton: Automaton, model: ServedModel) -> tuple[bytes, bytes]:
    """Return the text before the last token, cut to the length of a stop string, and the text of the last token."""
    *before, last = request.tokens[request.prompt_tokens :].tolist()
    text_bytes = model.tokenizer.vocabulary.text_bytes
    return text_bytes(before)[-max(map(len, automaton.patterns)) :], text_bytes([last])
