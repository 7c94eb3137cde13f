"""Background responses: from a request that was accepted to the task that generates its response."""

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
    """Keeps a background response, whose row is in the store from the beginning."""

    background: Background | None = None
    running: Running | None = None

    async def keep(self, response: dict[str, Any]) -> None:
        """Keep the final state of the response. Raises ``LeaseLost`` if this gateway no longer generates it."""
        assert self.background is not None
        assert self.running is not None
        await self.background.end(self.running, response, self.addition(response))


async def respond_in_background(
    gateway: Gateway, answer: Answer, shape: ResponseShape, keeper: Keeper, caller: Caller, *, stream: bool
) -> Response:
    """Accept a request, and return its queued response, or with ``stream`` its events, which may be left at any time.

    Raises what a request in the foreground does before its first token, and ``Overloaded`` if too many run.
    """
    background = (await gateway.store.opened()).background
    background.check_room(caller.owner)
    accepted = await answer.respond(stream=True)
    assert isinstance(accepted, EventStream)
    events, close = accepted.taken()
    one = Running(shape.snapshot(), caller.owner, streamed=stream)
    shape.keep_with(BackgroundKeeper(**vars(keeper), background=background, running=one))
    one.resources.enter_context(gateway.guard.limits.running(caller.key, admitted=True))
    try:
        await finish_shielded(
            background.begin(one, keeper.items, _with_progress(background, one, shape, events), close)
        )
    except AlreadyExists:  # another try of this request was faster
        kept = await keeper.records.get(one.body["id"], caller.owner)
        if not stream:
            return Response(kept.body, headers=answer.headers, media_type="application/json")
    if stream:
        headers = answer.headers | {"x-request-id": shape.request_id}
        return EventStream(background.follow(one.body["id"], caller.owner, 0), lambda left: None, headers)
    return Response(orjson.dumps(one.body), headers=answer.headers, media_type="application/json")


async def _with_progress(
    background: Background, one: Running, shape: ResponseShape, events: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    """Yield ``events``, and store the response as it is when its first output comes."""
    queued = True
    async for data in events:
        if queued and not shape.queued:
            queued = False
            if not shape.ended:
                await background.progress(one, shape.snapshot())
        yield data
