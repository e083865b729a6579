"""Where each cut axis of a model falls for each tensor-parallel rank: heads, MLP width, experts, vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tllm.core.errors import PlanError, counted
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import DeltaSpec, LayerSpec, ModelSpec
from tllm.spec.plan import Experts, Plan

Range = tuple[int, int]

GROUP = 32
"""Columns of an MLP that activations share a scale with, where weights have few bits."""

GROUPS_OF_RANK = 8
"""Widths are cut between groups from so many a rank on: shares are then kept to within a sixteenth."""

HEAD_GROUP_TOLERANCE = 0.1
"""Cut between groups of query heads that share a kv head if no rank's number of heads is then off by more than this."""


@dataclass(frozen=True)
class Cut:
    """What one rank of a stage holds of each cut axis, as half-open ranges.

    `kv_heads` are those its query heads need; a kv head needed by two ranks is held by both. `experts` are whole
    experts (all of them when they are cut by width), `expert_width` the part of each one's width. Where `ep` replicas
    spread them further, this place in replica r holds `holders[r % ep]` of them. `value_heads` and `key_heads` are
    those of gated delta nets: the value heads are cut, and their key heads are held as kv heads are.
    """

    heads: Range
    kv_heads: Range
    width: Range
    experts: Range
    holders: tuple[Range, ...]
    expert_width: Range
    shared_width: Range
    vocab: Range
    value_heads: Range = (0, 0)
    key_heads: Range = (0, 0)


def size(part: Range) -> int:
    """How many heads, columns, experts or rows a half-open range has."""
    return part[1] - part[0]


def cut_stage(spec: ModelSpec, shares: tuple[int, ...], experts: Experts = "cut", ep: int = 1) -> tuple[Cut, ...]:
    """The cut of every rank of a stage, in proportion to `shares`. PlanError where there is too little to cut.

    It is the same in each replica: what differs among `ep` of them is in `holders`.
    """
    moe = next((layer.moe for layer in spec.layers if layer.moe), None)
    heads = cut_heads(spec.num_heads, spec.num_kv_heads, shares)
    group = spec.num_heads // spec.num_kv_heads
    width = whole_groups(spec.intermediate_size, shares, "MLP width")
    vocab = proportional(spec.vocab_size, shares, "vocabulary")
    whole = [(0, moe.num_experts)] * len(shares) if moe else [(0, 0)] * len(shares)
    expert_width = [(0, moe.width)] * len(shares) if moe else [(0, 0)] * len(shares)
    if moe and experts == "spread":
        whole = list(proportional(moe.num_experts, shares, "experts"))
    elif moe:
        expert_width = list(whole_groups(moe.width, shares, "expert width"))
    has_shared = moe is not None and moe.shared_width > 0
    shared = whole_groups(moe.shared_width, shares, "shared width") if moe and has_shared else ((0, 0),) * len(shares)
    delta = spec.delta
    values = cut_heads(delta.value_heads, delta.key_heads, shares, "value heads") if delta else ((0, 0),) * len(shares)
    return tuple(
        Cut(
            heads=heads[i],
            kv_heads=(heads[i][0] // group, -(-heads[i][1] // group)),
            width=width[i],
            experts=whole[i],
            holders=spread(whole[i], ep),
            expert_width=expert_width[i],
            shared_width=shared[i],
            vocab=vocab[i],
            value_heads=values[i],
            key_heads=_key_heads(delta, values[i]) if delta else (0, 0),
        )
        for i in range(len(shares))
    )


def stage_cuts(spec: ModelSpec, plan: Plan, stage: int) -> tuple[Cut, ...]:
    """The cut of every rank of one stage of a plan, in the first replica.

    On a grid it is that of the rank's column, and of the hidden size a rank's weights have `width_of` alone. Raises
    PlanError for a model that no grid is for, or one that is too small.
    """
    shape, of_stage = plan.grid_of(stage), plan.stages[stage]
    return cut_stage(spec, of_stage.shares, plan.experts, plan.ep) if shape is None else cut_grid(spec, shape)


def cut_grid(spec: ModelSpec, shape: GridShape) -> tuple[Cut, ...]:
    """The cut of every rank of a grid, which is that of its column. PlanError as for `stage_cuts`."""
    _check_grid(spec, shape)
    columns = cut_stage(spec, (1,) * shape.side)
    return tuple(columns[shape.place(rank).column] for rank in range(shape.ranks))


def width_of(hidden_size: int, shape: GridShape | None, place: int) -> Range:
    """The columns of hidden states that the weights of a rank of a stage are for: all of them where it is no grid."""
    if shape is None:
        return 0, hidden_size
    at, even = shape.place(place), (1,) * shape.side
    if shape.mode != "3d":
        return proportional(hidden_size, even, "hidden size")[at.row]
    start, stop = proportional(hidden_size, even, "hidden size")[at.layer]
    first, last = proportional(stop - start, even, "hidden size")[at.row]
    return start + first, start + last


def _check_grid(spec: ModelSpec, shape: GridShape) -> None:
    """PlanError for a model that no grid is for, or one too small for it."""
    kinds = {
        "experts": any(layer.moe for layer in spec.layers),
        "latent attention": spec.latent is not None,
        "gated delta nets": spec.delta is not None,
        "attention sinks": spec.attention_sinks,
        "inputs of its own for each layer": spec.per_layer_width > 0,
        "keys shared between layers": any(layer.shares_keys for layer in spec.layers),
        "a scale for each layer": spec.layer_scale,
        "a classification head": spec.num_labels > 0,
        "weights of few bits": spec.quantization is not None,
    }
    for what, has in kinds.items():
        if has:
            raise PlanError(
                f"tensor={shape.mode} and a {spec.family} model with {what}: this is not cut both ways",
                "leave tensor out: all models are cut one way (tensor=1d)",
            )
    if spec.hidden_size < shape.width_parts:
        raise PlanError(
            f"hidden size {spec.hidden_size} cannot be cut into {shape.width_parts} parts for a grid of {shape}",
            "take a smaller grid",
        )


def _key_heads(delta: DeltaSpec, values: Range) -> Range:
    """The key heads, from the first to the last, that a rank's value heads use."""
    used = {delta.key_head(head) for head in range(*values)}
    return min(used), max(used) + 1


def as_layer(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> tuple[ModelSpec, Cut]:
    """The model and a rank's cut of it as this layer has its heads and its MLP, where they are its own (gemma4).

    Query heads are as many in every layer, and what a rank holds of them decides which key-value heads it needs. An MLP
    is some times as wide as the model's, and so is what a rank holds of it.
    """
    if layer.mlp_width:
        times = layer.mlp_width // spec.intermediate_size
        spec = replace(spec, intermediate_size=layer.mlp_width)
        cut = replace(cut, width=(times * cut.width[0], times * cut.width[1]))
    if not (layer.head_dim or layer.num_kv_heads):
        return spec, cut
    kv_heads = layer.num_kv_heads or spec.num_kv_heads
    group = spec.num_heads // kv_heads
    held = (cut.heads[0] // group, -(-cut.heads[1] // group))
    own = replace(spec, head_dim=layer.head_dim or spec.head_dim, num_kv_heads=kv_heads)
    return own, replace(cut, kv_heads=held)


def projected_width(spec: ModelSpec, layer: LayerSpec, cut: Cut) -> int:
    """Widths of queries, their gates, keys and values that a rank makes of a token's hidden state."""
    spec, cut = as_layer(spec, layer, cut)
    of_queries, of_keys = 1 + spec.attention_gate, 1 if layer.keys_are_values else 2
    if layer.shares_keys:
        of_keys = 0
    return (of_queries * size(cut.heads) + of_keys * size(cut.kv_heads)) * spec.head_dim


def spread(experts: Range, ep: int) -> tuple[Range, ...]:
    """The whole experts [first, stop) as even as can be over `ep` ranks, one or more each.

    >>> spread((2, 7), 2)
    ((2, 4), (4, 7))
    """
    first, count = experts[0], experts[1] - experts[0]
    if count < ep and ep > 1:
        raise PlanError(
            f"{counted(count, 'expert')} of a rank cannot be spread over ep={ep} replicas",
            f"give ep of at most {count}" if count > 1 else "leave ep out",
        )
    return tuple((first + count * rank // ep, first + count * (rank + 1) // ep) for rank in range(ep))


def proportional(total: int, shares: tuple[int, ...], what: str) -> tuple[Range, ...]:
    """`total` in order, cut in proportion to `shares`, each rank getting one or more.

    >>> proportional(8, (1, 2, 1), "heads")
    ((0, 2), (2, 6), (6, 8))
    """
    ranks = len(shares)
    if total < ranks:
        raise PlanError(
            f"{what} of {total} cannot be cut for {counted(ranks, 'rank')}",
            f"use at most {counted(total, 'rank')} in a stage (tp={total})",
        )
    bounds = [0]
    for i in range(ranks):
        ideal = (2 * total * sum(shares[: i + 1]) + sum(shares)) // (2 * sum(shares))
        bounds.append(min(max(ideal, bounds[-1] + 1), total - (ranks - 1 - i)))
    return tuple((bounds[i], bounds[i + 1]) for i in range(ranks))


def whole_groups(total: int, shares: tuple[int, ...], what: str) -> tuple[Range, ...]:
    """The same, cut between whole groups of columns where there are enough of them to keep to the shares.

    A group's activations are rounded together where weights have few bits, and vectors are whole.

    >>> whole_groups(1024, (1, 2), "MLP width")
    ((0, 352), (352, 1024))
    """
    groups, rest = divmod(total, GROUP)
    if rest or groups < GROUPS_OF_RANK * len(shares):
        return proportional(total, shares, what)
    return tuple((first * GROUP, last * GROUP) for first, last in proportional(groups, shares, what))


def cut_heads(
    num_heads: int, num_kv_heads: int, shares: tuple[int, ...], what: str = "query heads"
) -> tuple[Range, ...]:
    """Query heads of each rank. Whole groups that share a kv head where that keeps to the shares, else single heads.

    Single heads keep any proportion and any number of ranks possible; the kv heads at a seam are then held twice.
    """
    single = proportional(num_heads, shares, what)
    if num_kv_heads < len(shares):
        return single
    group = num_heads // num_kv_heads
    grouped = tuple((a * group, b * group) for a, b in proportional(num_kv_heads, shares, "kv heads"))
    equal = len(set(shares)) == 1
    ideal = [num_heads * share / sum(shares) for share in shares]
    off = max(abs(b - a - want) / want for (a, b), want in zip(grouped, ideal, strict=True))
    return grouped if equal or off <= HEAD_GROUP_TOLERANCE else single


def kv_index(heads: Range, num_heads: int, num_kv_heads: int) -> tuple[int, ...] | None:
    """For each local query head its local kv head; None where they divide evenly (n uses n // (heads / kv heads))."""
    group = num_heads // num_kv_heads
    first = heads[0] // group
    index = tuple(head // group - first for head in range(*heads))
    counts = [index.count(kv) for kv in range(index[-1] + 1)]
    return None if len(set(counts)) == 1 else index
