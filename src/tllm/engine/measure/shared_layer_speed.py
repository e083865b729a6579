"""How fast ranks serve layers that are cut between them, measured on all of them together."""

from __future__ import annotations

import statistics
import time

import torch

from tllm.comm.collectives.group import Group
from tllm.comm.collectives.tuning import max_over_ranks
from tllm.engine.measure.benchmark_layers import BenchmarkLayers, Work, batch_of
from tllm.spec.model_spec import ModelSpec

MIN_PASSES = 2
"""Passes that are measured at least."""


@torch.inference_mode()
def shared_layer_seconds(spec: ModelSpec, dtype: torch.dtype, tp: Group, prompt: int, seconds: float) -> float:
    """Seconds of a layer of which each rank of `tp` has an equal part, for the next token after a prompt.

    All ranks call it, for about so many seconds, and go through as many layers as `BenchmarkLayers` has. So their
    collectives come when caches are cold, from the weights and from the wait before. The result is the median of all
    passes, as something else that holds up one rank holds up all.
    """
    layers, batch = BenchmarkLayers(spec, dtype, tp.size, tp), batch_of(1, 1, prompt)
    work = layers.forward_pass(batch, [batch])
    work()
    count = max(MIN_PASSES, int(1 / max_over_ranks(tp, _seconds(work) / seconds)))  # all go through as many passes
    return statistics.median(_seconds(work) for _ in range(count)) / layers.num_layers


def _seconds(work: Work) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
