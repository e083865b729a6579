"""Bytes and messages of all ranks together for one dense layer in 1D, 2D, 2.5D and 3D tensor parallelism.

For T tokens of a microbatch, hidden states of D, products into widths A (queries, keys, values; gate and up) and out of
widths B (heads; the MLP), P = D (sum of A and B) elements of weights, and n = q q d ranks (3d: n = q q q):

              forward                             backward
    1d        4 (n - 1) T D                       4 (n - 1) T D
    2d, 2.5d  (q - 1) (4 T D + d P)               (q - 1) (6 T D + 2 d P), and d (d - 1) P once a step
    3d        (q - 1) (4 T D + T (A + B) + P)     (q - 1) (T (6 D + A + 2 B) + 2 P)

elements, and so a grid of two dimensions sends less than 1d in both passes together where T D > 3 P / (8 q - 2). Norms
add sums of one number a token. An all-reduce of a short message sends (n - 1) times it from each rank.
"""

from __future__ import annotations

from typing import NamedTuple

from tllm.planner.cost.messages.collective_bytes import all_reduce, one_shot_limit
from tllm.spec.cut import as_layer, cut_stage, projected_width, size
from tllm.spec.grid.grid_shape import GridShape, TensorMode, grid_shape
from tllm.spec.model_spec import LayerSpec, ModelSpec


class Sent(NamedTuple):
    """Bytes and messages of all ranks together."""

    bytes: int = 0
    messages: int = 0

    def plus(self, other: Sent, times: int = 1) -> Sent:
        return Sent(self.bytes + times * other.bytes, self.messages + times * other.messages)


class LayerSent(NamedTuple):
    """Of one microbatch's passes through a layer; and bytes of weights' gradients that layers of a grid sum, once a
    step."""

    forward: Sent
    backward: Sent
    step_bytes: int = 0


class LayerWidths(NamedTuple):
    """D, the sum of the widths that products go into, and of those that they come out of, over all columns of a grid.

    Key-value heads that several columns need count for each.
    """

    hidden: int
    into: int
    out_of: int

    @property
    def weights(self) -> int:
        return self.hidden * (self.into + self.out_of)


def layer_widths(spec: ModelSpec, columns: int, layer: LayerSpec) -> LayerWidths:
    """Those of a dense layer."""
    cuts = cut_stage(spec, (1,) * columns)
    own, _ = as_layer(spec, layer, cuts[0])
    projected = sum(projected_width(spec, layer, cut) for cut in cuts)
    heads = sum(size(cut.heads) for cut in cuts) * own.head_dim
    return LayerWidths(
        spec.hidden_size, projected + spec.into_mlp * own.intermediate_size, heads + own.intermediate_size
    )


def layer_sent(
    spec: ModelSpec, mode: TensorMode, ranks: int, tokens: int, item: int = 4, layer: LayerSpec | None = None
) -> LayerSent:
    """What a dense layer, the first one if none is given, sends for `tokens` of a microbatch, at `item` bytes an
    element.

    Blocks of tokens must be even. Raises PlanError where the ranks form no such grid.
    """
    shape, upcast = grid_shape(mode, ranks), max(item, 4)
    if shape is None:
        sums = _all_reduces(1, ranks, tokens * spec.hidden_size, item)
        return LayerSent(Sent().plus(sums, 2), Sent().plus(sums, 2))
    widths, step = layer_widths(spec, shape.side, layer or spec.layers[0]), 0
    squares = _all_reduces(ranks // shape.side, shape.side, tokens // shape.token_blocks, upcast)
    norms = (4 if spec.norm_order == "both" else 2) + (2 if spec.qk_norm == "full" else 0)
    forward, backward = _in_space(shape, widths, tokens) if mode == "3d" else _in_plane(shape, widths, tokens)
    if mode == "2.5d":
        step = shape.depth * (shape.depth - 1) * widths.weights * item
    return LayerSent(
        Sent(forward.bytes * item, forward.messages).plus(squares, norms),
        Sent(backward.bytes * item, backward.messages).plus(squares, norms),
        step,
    )


def _in_plane(shape: GridShape, widths: LayerWidths, tokens: int) -> tuple[Sent, Sent]:
    """Elements and messages of the four products by SUMMA: each matrix that travels goes to, or comes from, q - 1."""
    others, x, weights = shape.side - 1, tokens * widths.hidden, shape.depth * widths.weights
    each = shape.ranks * others
    return (
        Sent(others * (4 * x + weights), 4 * 2 * each),
        Sent(others * (6 * x + 2 * weights), (2 * 4 + 2 * 3) * each),
    )


def _in_space(shape: GridShape, widths: LayerWidths, tokens: int) -> tuple[Sent, Sent]:
    """The same of gathers and scatters on a cube: of both inputs and the output, and of gradients."""
    others, x = shape.side - 1, tokens * widths.hidden
    into, out_of = tokens * widths.into, tokens * widths.out_of
    each = shape.ranks * others
    return (
        Sent(others * (4 * x + into + out_of + widths.weights), 4 * 3 * each),
        Sent(others * (6 * x + into + 2 * out_of + 2 * widths.weights), 4 * 5 * each),
    )


def _all_reduces(groups: int, ranks: int, elements: int, item: int) -> Sent:
    """One all-reduce in each of some groups of ranks."""
    rounds = 1 if elements * item <= one_shot_limit(ranks) else 2
    sent = sum(all_reduce(elements, item, rank, ranks) for rank in range(ranks))
    return Sent(groups * sent, groups * rounds * ranks * (ranks - 1))
