"""How a node joins: it finds the right cluster by the fingerprint, gets a certificate for its token, and attaches."""

from __future__ import annotations

import asyncio
import hmac
import logging
import random
import ssl
import time
from typing import Any

import msgspec

from tllm import __version__
from tllm.cluster.certificates import COORDINATOR, Identity, fingerprint_of, first_certificate, make_request
from tllm.cluster.channel import QUESTION, Channel
from tllm.cluster.connection import Address, TurnedAway, Unreachable, connect_tls
from tllm.cluster.join_token import JoinToken
from tllm.cluster.messages import (
    GUEST_BYTES,
    MEMBER_BYTES,
    PROTOCOL,
    Attach,
    Attached,
    Hello,
    Join,
    Joined,
    Message,
    NodeFacts,
    Refused,
    RoleTaken,
    ToGuest,
    ToNode,
    Welcome,
)
from tllm.cluster.remote_errors import error_of, printable
from tllm.cluster.tls import guest_client, member_client, unverified_client
from tllm.core.errors import AuthError, ClusterError
from tllm.core.program import source_digest

log = logging.getLogger("tllm.cluster")

REACH_SECONDS, REACH_EVERY = 10.0, 0.5
"""How long a coordinator has to answer, and how long after it did not the next attempt begins: it may start later."""

KNOCK_SECONDS = 60.0
"""A node that is turned away at the door knocks again for so long: where thousands come at once, only some get in."""

FIRST_KNOCK, LONGEST_KNOCK = 0.2, 4.0
"""Seconds from one knock to the next, doubled each time up to the longest, each drawn from its half up to it."""


async def locate(address: Address, wait: float = 0.0) -> Address:
    """Where the coordinator listens: here, or where who answers here says. It is not trusted: `join` asks for proof.

    Unreachable if nobody is here within `wait` seconds.
    """
    until, is_told = time.monotonic() + wait, False
    while True:
        try:
            welcome = await _ask(address, unverified_client(), Hello(PROTOCOL), Welcome)
            return (welcome.host, welcome.port) if welcome.host else address
        except Unreachable as error:
            if time.monotonic() + REACH_EVERY > until:
                raise
            if not is_told:
                log.warning("%s; tries again for %g s", error.message, wait)
            is_told = True
        await asyncio.sleep(REACH_EVERY)


async def join(address: Address, token: JoinToken, node: str) -> Identity:
    """Get a certificate in the name `node`. The key is made here and stays here."""
    welcome = await _ask(address, unverified_client(), Hello(PROTOCOL), Welcome)
    if welcome.protocol != PROTOCOL:
        raise AuthError(
            f"the coordinator speaks protocol {welcome.protocol}, this node speaks {PROTOCOL}",
            "install the same version of tllm on every machine",
        )
    authority = first_certificate(welcome.authority)
    if not hmac.compare_digest(fingerprint_of(authority), token.fingerprint):
        raise AuthError(
            "the cluster at this address is not the one that the join token was made for, or has another secret",
            "see the address, and that TLLM_SECRET, if you use it, is the same on all machines; if they are right, "
            "somebody may stand in between: ask for a new token another way",
        )
    key, request = make_request(node)
    context = guest_client(authority)
    question = Join(PROTOCOL, __version__, node, token.secret, request, source_digest())
    joined = await _ask(address, context, question, Joined)
    log.info("%s joined the cluster at %s:%s", node, *address)
    return Identity(node, joined.certificate, key, authority)


async def attach(
    address: Address,
    identity: Identity,
    facts: NodeFacts,
    epoch: int = 0,
    rank: int | None = None,
    role: RoleTaken | None = None,
) -> tuple[Channel, Attached]:
    """Become a member: the channel to the coordinator, and what it asks of members.

    `epoch` and `rank` are the last that this node had, and `role` what it does beside any plan.
    """
    channel = await knock(address, member_client(identity), COORDINATOR, ToNode, MEMBER_BYTES, KNOCK_SECONDS)
    try:
        return channel, await _question(channel, Attach(PROTOCOL, facts, epoch, rank, role), Attached)
    except BaseException:
        channel.abort()
        raise


async def _ask(address: Address, context: ssl.SSLContext, message: Message, wanted: type[Any]) -> Any:
    channel = await knock(address, context, COORDINATOR, ToGuest, GUEST_BYTES, KNOCK_SECONDS)
    try:
        return await _question(channel, message, wanted)
    finally:
        await channel.close()


async def knock(
    address: Address, context: ssl.SSLContext, name: str, accepts: Any, limit: int, seconds: float
) -> Channel:
    """Connect, again and again while `name` turns everybody away who comes. TurnedAway if it does for `seconds`."""
    until, wait = time.monotonic() + seconds, FIRST_KNOCK
    while True:
        try:
            return await connect_tls(address, context, name, accepts, limit, REACH_SECONDS)
        except TurnedAway as error:
            pause = random.uniform(wait / 2, wait)
            if time.monotonic() + pause > until:
                raise
            if wait == FIRST_KNOCK:
                log.warning("%s; knocks again for up to %g s", error.message, seconds)
        await asyncio.sleep(pause)
        wait = min(2 * wait, LONGEST_KNOCK)


async def _question(channel: Channel, message: Message, wanted: type[Any]) -> Any:
    """Ask on a channel whose `run` has not begun."""
    await channel.write(QUESTION, 0, message)
    frame = await channel.receive_within(REACH_SECONDS)
    if frame is None:
        raise ClusterError(f"{channel.peer} closed the connection without an answer", "see the coordinator's log")
    if isinstance(said := frame.message, Refused):
        said = msgspec.structs.replace(said, reason=printable(said.reason), hint=printable(said.hint))
        raise error_of(said, f"{channel.peer} refused")
    if not isinstance(frame.message, wanted):
        raise ClusterError(f"{channel.peer} answered {type(message).__name__} with {type(frame.message).__name__}")
    return frame.message
