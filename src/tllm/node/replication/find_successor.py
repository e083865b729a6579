"""How a first machine that was deposed finds who coordinates now, while its replica votes on for the others."""

from __future__ import annotations

import asyncio
import math

from tllm.cluster.certificates import Identity
from tllm.cluster.connection import Address
from tllm.cluster.consensus.raft_messages import CoordinatorFound
from tllm.cluster.consensus.replica import Replica, answers_of, ask_replicas

LOOK_SECONDS = 0.3
"""From one question to the other replicas to the next: who has been elected tells nobody unasked."""

HAND_OVER_SECONDS = 5.0
"""How long another replica may take to lead."""


async def find_successor(replica: Replica, identity: Identity, seconds: float) -> Address | None:
    """Where the process coordinates that the replicas have elected; None where none is found for so many seconds.

    This replica votes on meanwhile, as another may be elected by its vote alone, where all were cut off from each other
    and some have ended since. If it is elected itself it lets another lead: its process has no nodes any more. Its vote
    is needed until the others are enough, or have had the time to count it no more.
    """
    until, spared_by = replica.now() + seconds, math.inf
    while True:
        if replica.leads:
            await replica.hand_over(HAND_OVER_SECONDS)
        others = [place for place in replica.raft.log.configuration if place != replica.place]
        found, _ = await ask_replicas(others, identity)
        now = replica.now()
        if found is not None:
            spared_by = min(spared_by, now + 2 * replica.timing.election + HAND_OVER_SECONDS)
            if now > spared_by or await _is_spared(replica, found, identity):
                return found.address
        if now > until:
            return None if found is None else found.address
        await asyncio.sleep(LOOK_SECONDS)


async def _is_spared(replica: Replica, found: CoordinatorFound, identity: Identity) -> bool:
    """Whether the coordinator that was found does not count this replica, or has a majority without it."""
    others = [place for place in found.replicas if place != replica.place]
    if len(others) == len(found.replicas):
        return True
    return 2 * len(await answers_of(others, identity)) > len(found.replicas)
