"""Bytes that the products of a grid work with and receive into, in training.

With T tokens, D columns of hidden states and P of the width of weights on a rank of a grid of side q, a product with F
columns holds beside its gradients, of a square, four blocks of F P (what comes, what is made of it, and both once
more on their way); of a cube what it gathers and makes for the others too: q times T (F + 2 D) and two of F P.
"""

from __future__ import annotations

from typing import NamedTuple

from tllm.planner.cost.grid_work import hidden_part
from tllm.planner.cost.rank_bytes import part_of_width
from tllm.planner.cost.rank_work import RankWork
from tllm.spec.cut import as_layer, projected_width, size
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import ModelSpec


class ProductBytes(NamedTuple):
    """`layer`, `logits`: workspace of the largest product of a layer, and of logits; `received`: receive buffers."""

    layer: int = 0
    logits: int = 0
    received: int = 0


def product_bytes(spec: ModelSpec, shape: GridShape | None, work: RankWork) -> ProductBytes:
    """Of a rank; nothing where it is on no grid."""
    if shape is None:
        return ProductBytes()
    T, b, q, cut = work.batch.tokens, work.batch.item_bytes, shape.side, work.cut
    D, P = hidden_part(spec, shape).hidden_size, part_of_width(spec, shape, work.at.tp).hidden_size
    V, widest = size(cut.vocab), 0
    for layer in {spec.layers[number] for run in work.runs for number in run}:
        of_mlp = spec.into_mlp * size(as_layer(spec, layer, cut)[1].width)
        widest = max(widest, projected_width(spec, layer, cut), of_mlp)
    if shape.mode == "3d":
        of_layer, of_logits = (q * (T * (F + 2 * D) + 2 * F * P) for F in (widest, V))
        rows = max(widest, V, D)
    else:
        of_layer, of_logits, rows = 4 * widest * P, 4 * V * P, D
    return ProductBytes(b * of_layer, b * of_logits, b * (q - 1) * (T * rows + max(widest, V) * P))
