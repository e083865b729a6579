"""How long a token takes round a ring of two ranks beside their layers: what neither shows alone is measured here.

A batch comes after a wait, when caches are cold, from a rank that was computing; and the driver tells what it is before
it computes its own layers.
"""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from tllm.core.errors import UNREADABLE, FrameError
from tllm.engine.driver import Deliver, Driver
from tllm.engine.measure.layer_speed import HeldLayers
from tllm.engine.measure.step_speed import TOKENS, timed, token_of_each
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import RingLinks
from tllm.spec.model_spec import ModelSpec

LEAST = 3
"""Tokens that are measured."""

ITEM = 32
"""Bytes, at the most, of a number as text."""


@torch.inference_mode()
def ring_turn(
    spec: ModelSpec,
    dtype: torch.dtype,
    ring: RingLinks,
    place: int,
    seconds: float,
    deliver: Deliver = lambda outputs: None,
) -> float:
    """Seconds of a token's turn, beside the layers of both, where this rank is the driver.

    The ranks at places 0 and 1 call it, each with its links to the other and for about as long; each is the driver for
    half of it. Each layer's time is that of the same turn, so that a machine's speed at another moment does not count;
    and the middle of all turns does, as one that something else holds up holds up both.
    """
    held, found = HeldLayers(spec, dtype, 1), 0.0
    for driver in range(2):
        if driver == place:
            found = _drive(held, ring, seconds / 2, deliver)
        else:
            _follow(held, ring)
    return found


def _drive(held: HeldLayers, ring: RingLinks, seconds: float, deliver: Deliver) -> float:
    """Turns for so many seconds, of which the first, with a prompt, does not count."""
    stage = held.stage(1, 1, ring, last=False)
    layers, driver, turns = timed(stage), Driver(stage, Scheduler(stage.limits)), list[float]()
    token_of_each(driver, 1, 1, deliver)
    skipped, until = len(layers.seconds), time.perf_counter() + seconds
    while len(turns) < LEAST or (time.perf_counter() < until and driver.has_work):
        begun = time.perf_counter()
        token_of_each(driver, 1, 1, deliver)
        turns.append(time.perf_counter() - begun)
    driver.close()
    theirs = _times(ring.previous.recv_bytes(ITEM * (TOKENS + LEAST)))
    each = zip(turns, layers.seconds[skipped:], theirs[skipped:], strict=True)
    return statistics.median(turn - mine - other for turn, mine, other in each)


def _follow(held: HeldLayers, ring: RingLinks) -> None:
    """Until the driver has closed the ring; then it is told what each batch took here."""
    stage = held.stage(1, 1, ring, first=False)
    layers = timed(stage)
    stage.serve()
    ring.next.send_bytes(msgspec.json.encode(layers.seconds))


def _times(payload: bytes) -> list[float]:
    try:
        return msgspec.json.decode(payload, type=list[float])
    except UNREADABLE as error:
        raise FrameError(f"no seconds came from the other rank of a ring: {error}") from error
