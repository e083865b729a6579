"""What a rank of a grid sends for a microbatch in training, and for how many messages it waits.

Bytes of layers are the mean of all ranks by `layer_traffic`'s law, which are equal where blocks are even. Beside them,
for T tokens of a block, D columns of hidden states and P of the width of its weights, and V of the vocabulary:

    embedding   T P to each rank that takes a block of what was looked up, and T D back
    logits      2d: (q - 1) 3 (T D + V P)    3d: (q - 1) (3 T D + 2 T V + 3 V P)
    final norm  a number for each token, forward and backward
    loss        four numbers for each token, to the others of its row

Of a square one rank at a time sends a block to all others of its row or column, or sums one, while they wait: the
messages of q ranks follow one another. All ranks of a cube send at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tllm.planner.cost.activations import Microbatch
from tllm.planner.cost.grid_work import hidden_part
from tllm.planner.cost.messages.collective_bytes import all_gather, all_reduce
from tllm.planner.cost.messages.layer_traffic import layer_sent
from tllm.planner.cost.rank_bytes import part_of_width
from tllm.planner.cost.rank_work import RankWork
from tllm.spec.cut import Cut, Range, as_layer, size
from tllm.spec.grid.grid_shape import GridPlace, GridShape
from tllm.spec.model_spec import LayerSpec, ModelSpec


def sent_on_grid(spec: ModelSpec, shape: GridShape, work: RankWork, again: bool) -> int:
    """Bytes of one rank for one microbatch. `again`: layers are computed a second time in the backward pass."""
    batch, layers = work.batch, Counter(spec.layers[number] for run in work.runs for number in run)
    total = _ends(spec, shape, work.at.tp, work.cut, batch)
    for layer, count in layers.items():
        law = layer_sent(spec, shape.mode, shape.ranks, shape.token_blocks * batch.tokens, batch.item_bytes, layer)
        total += count * ((1 + again) * law.forward.bytes + law.backward.bytes) // shape.ranks
    return total


def _ends(spec: ModelSpec, shape: GridShape, place: int, cut: Cut, batch: Microbatch) -> int:
    """Embedding, final norm, logits and loss."""
    T, b, w, others = batch.tokens, batch.item_bytes, batch.upcast_bytes, shape.side - 1
    D, P = hidden_part(spec, shape).hidden_size, part_of_width(spec, shape, place).hidden_size
    V, at = size(cut.vocab), shape.place(place)
    if shape.mode == "3d":
        looked_up, logits = (shape.side**2 - 1) * 2 * T * P, others * (3 * T * D + 2 * T * V + 3 * V * P)
    else:
        looked_up, logits = (shape.side - (at.row == at.column)) * T * (P + D), others * 3 * (T * D + V * P)
    return b * (looked_up + logits) + 2 * all_reduce(T, w, 0, shape.side) + all_gather(4 * T * w, shape.side)


def rounds_on_grid(spec: ModelSpec, shape: GridShape, layers: int, again: bool) -> int:
    """Messages of one microbatch that a rank waits for, one after the other, in so many layers and at the model's
    ends."""
    forward, backward, into = (12, 20, 8) if shape.mode == "3d" else (8 * shape.side, 14 * shape.side, 6 * shape.side)
    norms = (4 if spec.norm_order == "both" else 2) + 2 * (spec.qk_norm == "full")
    return layers * ((1 + again) * (forward + norms) + backward + norms) + into + 5


def waits_in_turn(shape: GridShape) -> int:
    """How many ranks send one after another what each of them sends in a row or column."""
    return 1 if shape.mode == "3d" else shape.side


def parts_on_grid(spec: ModelSpec, shape: GridShape, place: int, cuts: Sequence[Cut], layers: list[LayerSpec]) -> int:
    """Elements of gradients of which other ranks of the grid have parts too, once for each of these ranks: of norms and
    biases, whose columns others have for other tokens; of key-value heads that several columns need; and of all
    weights on other squares of 2.5D."""
    at, total = shape.place(place), 0
    for other in range(shape.ranks):
        if other != place:
            there = shape.place(other)
            total += _parts_with(spec, shape, at, there, (cuts[place], cuts[other]), layers)
    return total


def _parts_with(
    spec: ModelSpec, shape: GridShape, at: GridPlace, there: GridPlace, cuts: tuple[Cut, Cut], layers: list[LayerSpec]
) -> int:
    """With one other rank of the grid."""
    is_cube, here, D = shape.mode == "3d", shape.rank_at(*at), hidden_part(spec, shape).hidden_size
    same_hidden = at.layer == there.layer if is_cube else at.column == there.column
    same_width = at.row == there.row and (not is_cube or at.layer == there.layer)
    is_twin = same_width and at.column == there.column
    P = part_of_width(spec, shape, here).hidden_size * same_width
    vectors = (4 if spec.norm_order == "both" else 2) + spec.output_bias + spec.mlp_bias
    total = same_hidden * D + is_twin * size(cuts[0].vocab) * P * (1 if spec.tied else 2)
    for layer in layers:
        total += same_hidden * vectors * D
        own, mine = as_layer(spec, layer, cuts[0])
        _, its = as_layer(spec, layer, cuts[1])
        of_keys, same_column = 1 if layer.keys_are_values else 2, at.column == there.column
        keys = _overlap(mine.kv_heads, its.kv_heads) * own.head_dim
        heads = same_column * size(mine.heads) * own.head_dim
        rows = of_keys * keys + (1 + spec.attention_gate) * heads
        total += rows * (P + spec.attention_bias)
        total += {"none": 0, "head": 2 * own.head_dim, "full": heads + keys}[spec.qk_norm]
        total += same_column * spec.mlp_bias * spec.into_mlp * size(mine.width)
        total += is_twin * P * (size(mine.heads) * own.head_dim + (1 + spec.into_mlp) * size(mine.width))
    return total


def _overlap(a: Range, b: Range) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))
