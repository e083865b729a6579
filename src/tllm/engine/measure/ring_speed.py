"""How long a token takes round a ring of two ranks beside their layers, which neither rank can measure alone.

In a ring a batch comes after a wait, when caches are cold, and from a rank that was computing just before; and the
driver sends the batch on before it computes its own layers.
"""

from __future__ import annotations

import statistics
import time

import msgspec
import torch

from tllm.core.errors import decoded
from tllm.engine.driver import Deliver, Driver
from tllm.engine.measure.benchmark_layers import BenchmarkLayers
from tllm.engine.measure.step_speed import MAX_REPLY_TOKENS, MIN_STEPS, decode_step, time_layers
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.scheduler import Scheduler
from tllm.spec.model_spec import ModelSpec

NUMBER_BYTES = 32
"""At the most, of a number as text."""


@torch.inference_mode()
def ring_step_overhead(
    spec: ModelSpec,
    dtype: torch.dtype,
    ring: RingLinks,
    place: int,
    seconds: float,
    deliver: Deliver = lambda outputs: None,
) -> float:
    """Seconds of a token's step round the ring, without the layers of both ranks, where this rank is the driver.

    The ranks at places 0 and 1 call it, each with its links to the other and for about as long; each is the driver for
    half of it. The layers' time is that of the same step, so that a machine's speed at another moment does not count.
    The result is the median of all steps, as something else that holds one up holds up both ranks.
    """
    layers, overhead = BenchmarkLayers(spec, dtype, 1), 0.0
    for driver in range(2):
        if driver == place:
            overhead = _drive(layers, ring, seconds / 2, deliver)
        else:
            _follow(layers, ring)
    return overhead


def _drive(layers: BenchmarkLayers, ring: RingLinks, seconds: float, deliver: Deliver) -> float:
    """Decode for so many seconds; the first step, with the prompt, does not count."""
    stage = layers.stage(1, 1, ring, is_last=False)
    own, driver, steps = time_layers(stage), Driver(stage, Scheduler(stage.limits)), list[float]()
    decode_step(driver, 1, 1, deliver)
    skipped, until = len(own.seconds), time.perf_counter() + seconds
    while len(steps) < MIN_STEPS or (time.perf_counter() < until and driver.has_work):
        begun = time.perf_counter()
        decode_step(driver, 1, 1, deliver)
        steps.append(time.perf_counter() - begun)
    driver.close()
    sent = ring.previous.recv_bytes(NUMBER_BYTES * (MAX_REPLY_TOKENS + MIN_STEPS))
    followers = decoded(sent, _SECONDS, "no seconds came from the other rank of a ring")
    each = zip(steps, own.seconds[skipped:], followers[skipped:], strict=True)
    return statistics.median(step - mine - other for step, mine, other in each)


def _follow(layers: BenchmarkLayers, ring: RingLinks) -> None:
    """Serve until the driver has closed the ring, then send it what each batch took in the layers here."""
    stage = layers.stage(1, 1, ring, is_first=False)
    timed = time_layers(stage)
    stage.serve()
    ring.next.send_bytes(msgspec.json.encode(timed.seconds))


_SECONDS = msgspec.json.Decoder(list[float])
