"""What a backward pass has at once and gives back: gradients of activations, and of one parameter."""

from __future__ import annotations

from tllm.planner.activations import learned, scores_bytes
from tllm.planner.heap import LARGEST_KEPT
from tllm.planner.parameters import Parameter, size
from tllm.planner.ranks import RankWork
from tllm.spec.model import ModelSpec


def beside_bytes(spec: ModelSpec, work: RankWork) -> int:
    """The larger of what an MLP or attention and what logits have beside, whose gradient takes their own place."""
    T, b, batch = work.batch.tokens, work.batch.item, work.batch
    merged = (size(work.cut.heads) + 2 * size(work.cut.kv_heads)) * spec.head_dim
    most = T * b * (2 * spec.hidden_size + max(2 * merged, 3 * size(work.cut.width)))
    most += max(scores_bytes(spec, spec.layers[number], work.cut, batch) for run in work.runs for number in run)
    copies = (spec.final_softcap is not None) * batch.wide + (b < batch.wide) * b
    return max(most, logits_piece(spec, work) // batch.wide * copies)


def gradient_bytes(spec: ModelSpec, work: RankWork, parameters: list[Parameter]) -> int:
    """Of the largest parameter.

    Of a tied table that is looked up and makes logits on one rank torch has three at once: of either use, and their
    sum. They do not fit what passes left, unless that was mapped.
    """
    largest = max(one.elements for one in parameters) * work.batch.item
    if not (spec.tied and work.runs[0].start == 0 and work.runs[-1].stop == spec.num_layers):
        return largest
    tables = 3 * size(work.cut.vocab) * spec.hidden_size * work.batch.item
    logits = logits_piece(spec, work)
    return max(largest, tables - (logits if logits > LARGEST_KEPT else 0))


def logits_piece(spec: ModelSpec, work: RankWork) -> int:
    """Of one microbatch; 0 where none are made."""
    ends = any(run.stop == spec.num_layers for run in work.runs)
    return ends * learned(work.batch) * size(work.cut.vocab) * work.batch.wide
