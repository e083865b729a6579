"""Bytes that the passes of a step take in memory at their peak: activations, logits, gradients and workspace."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tllm.planner.cost.activations import logits_tokens, scores_bytes
from tllm.planner.cost.flops import head_width
from tllm.planner.cost.rank_work import RankWork
from tllm.planner.memory.grid_products import ProductBytes
from tllm.planner.memory.heap import heap_part
from tllm.planner.memory.live_activations import LiveActivations
from tllm.spec.cut import projected_width, size
from tllm.spec.model_spec import ModelSpec


class PassBytes(NamedTuple):
    """What passes have in memory at the peak, in bytes."""

    activations: int
    logits: int
    gradients: int
    """Gradients of parameters on their way to their buckets, and what a grid's products make them of."""
    gathered: int
    """Weights that are whole for a while (ZeRO 3)."""


def peak_pass_bytes(
    spec: ModelSpec,
    work: RankWork,
    live: LiveActivations,
    largest_gradient: int,
    unit_bytes: Sequence[int],
    products: ProductBytes,
) -> PassBytes:
    """The larger of two moments: a forward pass turns into its backward pass; or the gradient of a tied table is summed
    at the backward pass's end.

    Of a table that one rank both looks up and makes logits with, torch has three gradients then: of either use, and
    their sum. Activations in memory pieces of their own have gone back by then; those in the heap are held still, in
    pieces that a table's gradient does not fit into. `largest_gradient`: bytes of the largest gradient of one
    parameter; `unit_bytes`: with ZeRO 3, bytes of the weights of each unit, of which two that follow one another are
    whole at once; `products`: what those of a grid work with, of layers when the logits have gone."""
    gathered = max(map(sum, pairwise(unit_bytes)), default=sum(unit_bytes))
    wide = logits_piece(spec, work)  # of numbers of 16 bits, which products take, logits have gone then too
    of_logits = products.logits - wide * (work.batch.item_bytes < work.batch.upcast_bytes)
    of_products = max(of_logits, products.layer - wide, 0)
    turning = PassBytes(live.activations, live.logits, largest_gradient + of_products, gathered)
    if not (spec.tied and work.begins_model and work.ends_model(spec)) or work.adapter is not None:
        return turning
    layers = heap_part(live.layers_peak, layer_piece(spec, work))
    logits = heap_part(live.logits, logits_piece(spec, work))
    tables = 3 * work.parameters(spec)[0][0].elements * work.batch.item_bytes
    at_end = PassBytes(layers, logits, tables, heap_part(gathered, max(unit_bytes, default=0)))
    return max(turning, at_end, key=sum)


def workspace_bytes(spec: ModelSpec, work: RankWork) -> int:
    """Bytes that a backward pass works with on top of what is kept: the larger of an MLP's or attention's, by which the
    microbatch's logits are gone, and of the logits', whose gradient takes their own place."""
    T, b, batch = work.batch.tokens, work.batch.item_bytes, work.batch
    layers = {spec.layers[number] for run in work.runs for number in run}
    merged = max(projected_width(spec, layer, work.cut) for layer in layers)
    layer = T * b * (2 * spec.hidden_size + max(2 * merged, 3 * size(work.cut.width)))
    layer += max(scores_bytes(spec, layer, work.cut, batch) for layer in layers)
    logits_copies = (spec.final_softcap is not None) * batch.upcast_bytes + (b < batch.upcast_bytes) * b
    logits = logits_piece(spec, work)
    return max(layer - logits, logits // batch.upcast_bytes * logits_copies + layer_piece(spec, work))


def layer_piece(spec: ModelSpec, work: RankWork) -> int:
    """Bytes of a typical tensor that a layer keeps: one row for each token."""
    return work.batch.tokens * spec.hidden_size * work.batch.item_bytes


def logits_piece(spec: ModelSpec, work: RankWork) -> int:
    """Bytes of one microbatch's logits; 0 on a rank that makes none."""
    if not work.ends_model(spec):
        return 0
    return logits_tokens(work.batch) * head_width(spec, work.cut) * work.batch.upcast_bytes
