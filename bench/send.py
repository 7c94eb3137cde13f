"""Sends requests to a server all at once, for the programs that measure it."""

from collections.abc import Callable, Sequence

from services.cli.bench.clients import Clients
from services.cli.bench.exchange import Endpoint, Reply
from services.cli.bench.sending import Body, Share


def send_all(
    url: str, bodies: Sequence[Body], clients: int = 1, meanwhile: Callable[[], None] = lambda: None
) -> list[Reply]:
    """POST every body to ``url`` at once, from ``clients`` processes. Return the replies in the order of ``bodies``.

    ``meanwhile`` is called repeatedly in this thread until the last reply. It should sleep for a short time.
    """
    shares = []
    for first in range(min(clients, len(bodies))):
        numbers = range(first, len(bodies), clients)
        shares.append(Share(numbers, {number: bodies[number] for number in numbers}.__getitem__))
    replies: dict[int, Reply] = {}
    with Clients(Endpoint(url), shares) as processes:
        meanwhile()
        processes.begin()
        for reports in processes.reports():
            meanwhile()
            replies.update(pair for report in reports for pair in report.replies)
    return [replies[number] for number in range(len(bodies))]


def failures(replies: Sequence[Reply]) -> int:
    """Return the number of requests that failed, and print the first error."""
    failed = [reply.error for reply in replies if reply.error]
    if failed:
        print(f"{len(failed)} of {len(replies)} requests failed, the first: {failed[0]}")
    return len(failed)
