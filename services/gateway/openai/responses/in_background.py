"""Background responses: a task of the gateway generates the response, without a connected client."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import orjson
from fastapi import Response

from services.common.errors import AlreadyExists
from services.gateway.http.request import Caller
from services.gateway.openai.answer import Answer
from services.gateway.openai.gateway import Gateway
from services.gateway.openai.responses.keeping import Keeper
from services.gateway.openai.responses.shape import ResponseShape
from services.gateway.openai.sse import EventStream
from services.gateway.store.background import Background, Running, finish_shielded


@dataclass(frozen=True)
class BackgroundKeeper(Keeper):
    """Keeps a background response, whose row is in the store since it was queued."""

    background: Background | None = None
    running: Running | None = None

    async def keep(self, response: dict[str, Any]) -> None:
        """Store the final state of the response. Raises ``LeaseLost`` if this gateway no longer generates it."""
        assert self.background is not None
        assert self.running is not None
        await self.background.end(self.running, response, self.addition(response))


async def respond_in_background(
    gateway: Gateway, answer: Answer, shape: ResponseShape, keeper: Keeper, caller: Caller, *, stream: bool
) -> Response:
    """Start a request in the background. Return its queued response, or with ``stream`` its events.

    Raises the errors that a request in the foreground raises before its first token, and ``Overloaded`` if too many
    responses are generated.
    """
    background = (await gateway.store.opened()).background
    background.check_room(caller.owner)
    accepted = await answer.respond(stream=True)
    assert isinstance(accepted, EventStream)
    events, close = accepted.taken()
    running = Running(shape.snapshot(), caller.owner, streamed=stream)
    shape.keep_with(BackgroundKeeper(**vars(keeper), background=background, running=running))
    running.resources.enter_context(gateway.guard.limits.running(caller.key, admitted=True))
    try:
        await finish_shielded(
            background.begin(running, keeper.items, _with_progress(background, running, shape, events), close)
        )
    except AlreadyExists:  # a concurrent retry of this request created it
        kept = await keeper.records.get(running.body["id"], caller.owner)
        if not stream:
            return Response(kept.body, headers=answer.headers, media_type="application/json")
    if stream:
        headers = answer.headers | {"x-request-id": shape.request_id}
        return EventStream(background.follow(running.body["id"], caller.owner, 0), lambda disconnected: None, headers)
    return Response(orjson.dumps(running.body), headers=answer.headers, media_type="application/json")


async def _with_progress(
    background: Background, running: Running, shape: ResponseShape, events: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Yield ``events``, and store the state of the response at its first output."""
    queued = True
    async for data in events:
        if queued and not shape.queued:
            queued = False
            if not shape.ended:
                await background.progress(running, shape.snapshot())
        yield data
