"""What a step has at once where it has most: passes, gradients of parameters, and what backward passes have beside."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tllm.planner.cost.activations import logits_tokens, scores_bytes
from tllm.planner.cost.rank_work import RankWork
from tllm.planner.memory.heap import heap_part
from tllm.planner.memory.live_activations import LiveActivations
from tllm.spec.cut import size
from tllm.spec.model_spec import ModelSpec


class PassBytes(NamedTuple):
    """Bytes at one moment. `gradients`: of parameters, on their way; `gathered`: weights that are whole for a while."""

    activations: int
    logits: int
    gradients: int
    gathered: int


def peak_pass_bytes(
    spec: ModelSpec, work: RankWork, kept: LiveActivations, largest: int, units: Sequence[int]
) -> PassBytes:
    """The fuller of two moments: a pass turns back, or the gradient of a tied table comes together at its end.

    Of a table that is looked up and makes logits on one rank torch has three gradients then: of either use, and their
    sum. What was mapped has gone back by then; what lies in the heap is held still, in pieces that these do not fit.
    `largest`: the gradient of one parameter; `units`: of ZeRO-3, bytes of weights of each, two of which that follow one
    another are whole at once.
    """
    gathered = max(map(sum, pairwise(units)), default=sum(units))
    turning = PassBytes(kept.activations, kept.logits, largest, gathered)
    if not (spec.tied and work.runs[0].start == 0 and work.runs[-1].stop == spec.num_layers):
        return turning
    layers, logits = (
        heap_part(kept.layers_peak, layer_piece(spec, work)),
        heap_part(kept.logits, logits_piece(spec, work)),
    )
    tables = 3 * size(work.cut.vocab) * spec.hidden_size * work.batch.item_bytes
    return max(turning, PassBytes(layers, logits, tables, heap_part(gathered, max(units, default=0))), key=sum)


def workspace_bytes(spec: ModelSpec, work: RankWork) -> int:
    """The larger of what an MLP or attention and what logits have beside, whose gradient takes their own place."""
    T, b, batch = work.batch.tokens, work.batch.item_bytes, work.batch
    merged = (size(work.cut.heads) + 2 * size(work.cut.kv_heads)) * spec.head_dim
    most = T * b * (2 * spec.hidden_size + max(2 * merged, 3 * size(work.cut.width)))
    most += max(scores_bytes(spec, spec.layers[number], work.cut, batch) for run in work.runs for number in run)
    copies = (spec.final_softcap is not None) * batch.upcast_bytes + (b < batch.upcast_bytes) * b
    return max(most, logits_piece(spec, work) // batch.upcast_bytes * copies)


def layer_piece(spec: ModelSpec, work: RankWork) -> int:
    """Of what a layer keeps: a row for each token."""
    return work.batch.tokens * spec.hidden_size * work.batch.item_bytes


def logits_piece(spec: ModelSpec, work: RankWork) -> int:
    """Of one microbatch; 0 where none are made."""
    ends = any(run.stop == spec.num_layers for run in work.runs)
    return ends * logits_tokens(work.batch) * size(work.cut.vocab) * work.batch.upcast_bytes
