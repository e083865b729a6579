"""How fast ranks serve layers that they share: what none of their parts shows that is measured for itself."""

from __future__ import annotations

import statistics
import time

import torch

from tllm.comm.collectives.group import Group
from tllm.comm.collectives.tuning import max_over_ranks
from tllm.engine.measure.layer_speed import HeldLayers, Work, batch_of
from tllm.spec.model_spec import ModelSpec

LEAST = 2
"""Passes."""


@torch.inference_mode()
def shared_layer(spec: ModelSpec, dtype: torch.dtype, tp: Group, prompt: int, seconds: float) -> float:
    """Seconds of a layer of which each rank of `tp` has an equal part, for the next token after a prompt.

    All ranks call it, for about so many seconds, and go through as many layers as `HeldLayers` has. Their sums come
    when
    caches are cold of the weights, and of the wait before. The middle of all passes counts, as one that is held up by
    something else holds up everybody.
    """
    held, batch = HeldLayers(spec, dtype, tp.size, tp), batch_of(1, 1, prompt)
    work = held.through([batch], batch)
    work()
    count = max(LEAST, int(1 / max_over_ranks(tp, _seconds(work) / seconds)))  # all go through as many passes
    return statistics.median(_seconds(work) for _ in range(count)) / held.layers


def _seconds(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
