"""The schedule of faults, which depends only on the seed."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.chaos.network import OUTSIDE, Link

_ROLES = ("gateway", "scheduler", "worker")
_PARTED = ("gateway-scheduler", "scheduler-worker", "client-gateway")
# kill: SIGKILL. term: SIGTERM, as in a rolling restart. stop: SIGSTOP, and SIGCONT later. kill-schedulers: all at once.
KINDS = (
    *(f"{how}-{role}" for how in ("kill", "term", "stop") for role in _ROLES),
    "kill-schedulers",
    *(f"partition-{parted}" for parted in _PARTED),
)
_SHORTEST_S = 1.0


@dataclass(frozen=True)
class Fault:
    """A fault. ``at``: seconds since the load began. ``seconds``: duration of a stop or a partition."""

    at: float
    kind: str
    targets: tuple[str, ...]  # names of services; of a partition: the two, or the client and a gateway
    seconds: float

    @property
    def how(self) -> str:
        return self.kind.partition("-")[0]


def plan_faults(
    count: int,
    seconds: float,
    kinds: Sequence[str],
    services: Mapping[str, Sequence[str]],
    links: Sequence[Link],
    longest_s: float,
    seed: int,
) -> list[Fault]:
    """Return ``count`` faults within ``seconds``. Kinds take turns in random order. ``services``: names by role."""
    chance = random.Random(seed)
    times = sorted(chance.uniform(0.02, 0.96) * seconds for _ in range(count))
    faults, deck = [], []
    for at in times:
        if not deck:
            deck = chance.sample(list(kinds), len(kinds))
        kind = deck.pop()
        how, _, whom = kind.partition("-")
        lasting = chance.uniform(_SHORTEST_S, longest_s)
        if how == "partition":
            targets: tuple[str, ...] = chance.choice([link for link in links if _name(link) == whom])
        elif whom.endswith("s"):
            targets = tuple(services[whom.removesuffix("s")])
        else:
            targets = (chance.choice(services[whom]),)
        faults.append(Fault(at, kind, targets, lasting))
    return faults


def all_links(gateways: Sequence[str], schedulers: Sequence[str], workers: Sequence[str]) -> list[Link]:
    """Return all links: from every gateway to every scheduler, and from each scheduler to its worker."""
    return [
        *(Link(OUTSIDE, gateway) for gateway in gateways),
        *(Link(gateway, scheduler) for gateway in gateways for scheduler in schedulers),
        *(Link(scheduler, worker) for scheduler, worker in zip(schedulers, workers, strict=True)),
    ]


def _name(link: Link) -> str:
    return "-".join(end.partition("-")[0] for end in link)
