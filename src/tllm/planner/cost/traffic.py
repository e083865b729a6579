"""Bytes that a rank sends in one training step, group by group, without messages of a few bytes.

For L layers of width D, M microbatches of T tokens (t of them on a rank outside the cut layers), Ψ parameters, b bytes
of an activation or weight and w bytes of a gradient element:

    tp       an all-reduce of T D b bytes: 2 L forward, 2 L backward for each microbatch (Megatron-LM, 1909.08053);
             with sequence parallelism each is an all-gather and a reduce-scatter (2205.05198)
    pp       t D b for each hop, forward and backward, to each rank of the next stage that takes it from this one
    cp       forward: the keys and values that other ranks attend to; backward: the same once more, and gradients of
             those that this rank attends to (ring attention, 2310.01889)
    dp, edp  zero 0: an all-reduce of Ψ w; zero 1, 2: a reduce-scatter of Ψ w and an all-gather of Ψ b;
             zero 3: the reduce-scatter, and an all-gather of each unit for each use that does not directly follow
             another use of it (1910.02054); gradients in fewer bytes where they are compressed, and weights in one
             step of H with H local steps
    ep       tokens to their experts and back (`parallel.expert_dispatch`), for a token that goes to as many ranks as it
             has choices: the most that there can be
    replica  gradients of which several ranks have parts (shared key-value heads, tied tables), once a step

What is recomputed is sent again: `recompute=layer` repeats a layer's forward pass except an all-reduce at its very end
(`Execution.early_stop`).
Beside an adapter no gradient goes below the lowest adapted linear, and sums of gradients below it are not made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, product
from math import comb
from statistics import fmean

from tllm.planner.cluster.execution import TLLM, Execution
from tllm.planner.cost.activations import logits_tokens
from tllm.planner.cost.buckets import padded_elements, shares_table
from tllm.planner.cost.grid_step import parts_on_grid, sent_on_grid
from tllm.planner.cost.messages.collective_bytes import all_gather, all_reduce, reduce_scatter
from tllm.planner.cost.rank_bytes import (
    AdapterFacts,
    adapter_parameters,
    as_learned,
    end_parameters,
    layer_parameters,
)
from tllm.planner.cost.rank_work import (
    LayerGradients,
    RankWork,
    TrainingFacts,
    forward_only_layers,
    layer_gradients,
    rank_works,
    schedule_of,
    zigzag_spans,
)
from tllm.spec.cut import Cut, Range, as_layer, cut_stage, size, stage_cuts
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.pipeline_schedule import StageChunk
from tllm.spec.plan import Plan
from tllm.spec.process_groups import targets

Span = tuple[int, int]

LearningLayer = tuple[LayerSpec, LayerGradients]
"""A layer, and how far gradients go in it."""

EMBEDDING, HEAD = "embedding", "head"
INTEGER, ROW_NUMBER = 8, 4
"""Bytes of a count of rows, and of the index of a row of the table."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step over each group's links.

    Groups are as in `spec.process_groups`.
    """

    tp: int = 0
    pp: int = 0
    cp: int = 0
    dp: int = 0
    edp: int = 0
    ep: int = 0
    """The most that it can be on an average over ranks: no token finds two of its experts on one rank
    (`expected_dispatch_share` says how much of it to expect)."""
    replica: int = 0
    """To the other ranks of the same replica, for gradients of which several have parts."""
    servers: int = 0
    """To parameter servers."""

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def step_traffic(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    replicas: Sequence[int] | None = None,
    execution: Execution = TLLM,
) -> list[Traffic]:
    """The traffic of every rank that computes, or of those of some replicas.

    Raises PlanError where the plan does not fit the model.
    """
    spec = as_learned(spec, facts.adapter)
    cuts = [stage_cuts(spec, plan, stage) for stage in range(plan.pp)]
    known, every = dict[object, Traffic](), list[Traffic]()
    for work in rank_works(spec, plan, facts, replicas):
        # All else that decides what a rank sends is the plan's: ranks alike in this send equally much.
        key = work.microbatches, work.at._replace(replica=work.at.replica % plan.ep)
        if key not in known:
            known[key] = _of_rank(spec, plan, facts, work, cuts[work.at.stage], execution)
        every.append(known[key])
    return every


def _of_rank(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, cuts: Sequence[Cut], execution: Execution
) -> Traffic:
    """One rank's traffic. `cuts` are those of all ranks of its stage."""
    M, layers = work.microbatches, [spec.layers[number] for run in work.runs for number in run]
    shape = plan.grid_of(work.at.stage)
    if shape is not None:
        parts = parts_on_grid(spec, shape, work.at.tp, cuts, layers) * facts.full_precision_bytes
        tp, dp = sent_on_grid(spec, shape, work, plan.recompute == "layer"), _shared(spec, plan, facts, work, False)
        return Traffic(tp=M * tp, dp=dp, replica=parts)
    kinds = Counter((spec.layers[n], layer_gradients(spec, work, n)) for run in work.runs for n in run)
    stops = execution.stops_before_last_sum(spec, plan)
    tp = sum(n * _tp_of_layer(spec, kind, plan, work, stops) for kind, n in kinds.items())
    tp += _tp_of_ends(spec, plan, work)
    return Traffic(
        tp=M * tp if work.tp > 1 else 0,
        pp=M * _hops(spec, plan, work),
        cp=M * sum(n * _ring(spec, kind, plan, work) for kind, n in kinds.items()) if plan.cp > 1 else 0,
        dp=0 if plan.servers else _shared(spec, plan, facts, work, spread=False),
        edp=_shared(spec, plan, facts, work, spread=True),
        ep=M * sum(n * _dispatch(spec, kind, plan, work) for kind, n in kinds.items()) if plan.ep > 1 else 0,
        replica=_parts(spec, plan, work, cuts, layers) * facts.full_precision_bytes,
        servers=_served(spec, facts, work) if plan.servers else 0,
    )


def _tp_of_layer(spec: ModelSpec, kind: LearningLayer, plan: Plan, work: RankWork, stops: bool) -> int:
    """Bytes for one microbatch and one layer: its rows enter cut layers twice and leave them twice in the forward pass,
    and the other way round in the backward pass, as far as that goes. Experts and an MLP beside them leave as rows of
    their own. A forward pass that is made again `stops` before the last of them leave, or does not."""
    (layer, gradients), (T, D, b) = kind, (work.batch.tokens, spec.hidden_size, work.batch.item_bytes)
    again = gradients.halves > 0 and plan.recompute == "layer"
    leaves = layer.hidden_sums + again * (1 if stops else layer.hidden_sums)
    squares = 0
    if spec.qk_norm == "full":
        squares = (2 + 2 * gradients.core + 2 * again) * all_reduce(T, work.batch.upcast_bytes, work.at.tp, work.tp)
    if not plan.sequence:
        return squares + (leaves + gradients.inputs) * all_reduce(T * D, b, work.at.tp, work.tp)
    gather, scatter = _gather_scatter(spec, work)
    gathers = 2 + 2 * again + gradients.left(layer)
    return squares + gathers * gather + (leaves + gradients.inputs) * scatter


def _tp_of_ends(spec: ModelSpec, plan: Plan, work: RankWork) -> int:
    """Bytes for one microbatch: the embedding's all-reduce, that of the gradient of the last hidden state, and
    what the loss sends. A table beside an adapter has no gradient."""
    T, D, b = work.batch.tokens, spec.hidden_size, work.batch.item_bytes
    first, last = work.begins_model, work.ends_model(spec)
    loss = last * _of_loss(spec, work)
    if plan.sequence:
        gather, scatter = _gather_scatter(spec, work)
        return loss + (first * (work.adapter is None) + last) * gather + (first + last) * scatter
    sums = [T] * first + [logits_tokens(work.batch)] * last
    return loss + sum(all_reduce(tokens * D, b, work.at.tp, work.tp) for tokens in sums)


def _of_loss(spec: ModelSpec, work: RankWork) -> int:
    """Bytes for one microbatch: an all-gather of four numbers for each token of the loss, or an all-reduce of the
    scores of all tokens, which one rank tells, and none of its gradients."""
    tokens, w = logits_tokens(work.batch), work.batch.upcast_bytes
    if spec.num_labels:
        return all_reduce(tokens, w, work.at.tp, work.tp)
    return all_gather(4 * tokens * w, work.tp)


def _gather_scatter(spec: ModelSpec, work: RankWork) -> tuple[int, int]:
    """Bytes of an all-gather of a microbatch's tokens, and of a reduce-scatter of them."""
    row = spec.hidden_size * work.batch.item_bytes
    rows = work.batch.rows * row
    return all_gather(rows, work.tp), reduce_scatter(work.batch.tokens * row, rows)


def _hops(spec: ModelSpec, plan: Plan, work: RankWork) -> int:
    """Bytes for one microbatch, forward and backward, to the neighbouring stages."""
    sent, row = 0, work.batch.rows * spec.hidden_size * work.batch.item_bytes
    learns_from = plan.run_of(forward_only_layers(spec, work))
    for chunk in range(plan.chunks):
        here = chunk * plan.pp + work.at.stage
        for there in (here - 1, here + 1):
            stage = there % plan.pp
            if there < here <= learns_from:  # nothing there is learned
                continue
            if 0 <= there < len(plan.stages) and stage != work.at.stage:
                sent += len(targets(work.at.tp, work.tp, plan.stages[stage].tp)) * row
    return sent


def _ring(spec: ModelSpec, kind: LearningLayer, plan: Plan, work: RankWork) -> int:
    """Bytes for one microbatch through one layer of the keys and values that other context-parallel ranks attend to,
    and of the gradients of those that this rank attends to."""
    layer, gradients = kind
    lengths, spans = work.batch.lengths, zigzag_spans(sum(work.batch.lengths), plan.cp)
    starts = [0, *accumulate(lengths)]

    def low(query: int) -> int:
        """The first key that a query attends to."""
        start = starts[bisect_right(starts, query) - 1]
        return start if layer.window is None else max(start, query - layer.window + 1)

    here, others = work.at.cp, [rank for rank in range(plan.cp) if rank != work.at.cp]
    leave = sum(_seen(low, spans[rank], spans[here]) for rank in others)
    come = sum(_seen(low, spans[here], spans[rank]) for rank in others)
    again = gradients.core if plan.recompute == "selective" else gradients.halves > 0 and plan.recompute == "layer"
    passes = 1 + again + gradients.core
    spec, cut = as_layer(spec, layer, work.cut)
    return 2 * size(cut.kv_heads) * spec.head_dim * work.batch.item_bytes * (passes * leave + come * gradients.core)


def _seen(low: Callable[[int], int], queries: Sequence[Span], keys: Sequence[Span]) -> int:
    """How many of these keys some of these queries attend to: keys before the query, and inside its window."""
    seen = 0
    for start, stop in keys:
        first = min((low(query) for query, _ in queries if query >= stop), default=stop)
        seen += max(0, stop - max(start, first))
    return seen


def _shared(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, spread: bool) -> int:
    """Bytes for gradients and weights of ordinary parameters, or of experts that are divided over replicas
    (`spread`). Of local steps a part of what the outer step sends: the mean over all of them."""
    ranks = work.expert_replicas if spread else work.replicas
    parameters = [parameter for unit in work.learned(spec) for parameter in unit if parameter.spread == spread]
    whole = sum(map(padded_elements, parameters))
    if ranks == 1 or not whole:
        return 0
    share = facts.gradient_share(parameters, spec.hidden_size)
    if plan.zero == 0:
        buckets = max(1, round(whole * facts.full_precision_bytes / facts.bucket_bytes))
        sums = buckets * all_reduce(whole // buckets, facts.full_precision_bytes, 0, ranks)
        return round(sums * share / facts.local_steps)
    weights = _gathered(spec, plan, work, spread) if plan.zero == 3 else whole
    return round(scattered_bytes(whole, ranks, facts, share)) + all_gather(
        weights // ranks * facts.learned_bytes, ranks
    )


def scattered_bytes(whole: int, ranks: int, facts: TrainingFacts, share: float) -> float:
    """Bytes for the gradients of so many elements with ZeRO, of which this `share` travels. PowerSGD has all ranks get
    all of its columns and rows, which takes twice as many."""
    hops = 2 if facts.compression == "powersgd" else 1
    return hops * share * reduce_scatter(whole, whole // ranks) * facts.full_precision_bytes


def _gathered(spec: ModelSpec, plan: Plan, work: RankWork, spread: bool) -> int:
    """Elements of all units that a step gathers (ZeRO 3); a unit that is used twice in a row is gathered once."""
    if not work.microbatches:
        return 0
    sizes: dict[str, int] = {}
    units = [_units(spec, run, work, spread, sizes) for run in work.runs]
    schedule, stage = schedule_of(plan, work.microbatches), work.at.stage
    total, there = 0, frozenset[str]()
    for op in schedule.lists[stage]:
        # The model's start has all its backward pass where others have the weights' half, which reads no weight.
        starts = op.kind != "forward" and not schedule.wants_input_gradient(StageChunk(stage, op.chunk))
        if op.kind == ("backward_input" if starts else "backward_weight"):
            continue
        chunk = units[op.chunk]
        # The backward pass reads no weight of a table that was looked up.
        for unit in chunk if op.kind == "forward" else reversed([unit for unit in chunk if unit != {EMBEDDING}]):
            total += sum(sizes[part] for part in unit - there)
            there = unit
    return total


def _units(spec: ModelSpec, run: range, work: RankWork, spread: bool, sizes: dict[str, int]) -> list[frozenset[str]]:
    """The units of a run, each as the names of the parts that it needs; the elements of these are added to `sizes`."""
    first, last = end_parameters(spec, run, work.cut)
    parts = {EMBEDDING: first, HEAD: last}
    parts |= {str(n): layer_parameters(spec, spec.layers[n], work.cut, work.at.replica) for n in run}
    sizes |= {
        name: sum(padded_elements(parameter) for parameter in part if parameter.spread == spread)
        for name, part in parts.items()
        if part
    }
    units = [frozenset({EMBEDDING})] * bool(first) + [frozenset({str(n)}) for n in run]
    tied = {EMBEDDING} if spec.tied and first else frozenset[str]()
    return units + [frozenset({HEAD} | tied)] * bool(last)


def _dispatch(spec: ModelSpec, kind: LearningLayer, plan: Plan, work: RankWork) -> int:
    """Bytes for one microbatch through one layer, if each token goes to as many other ranks as it can."""
    layer, gradients = kind
    if layer.moe is None:
        return 0
    D, K = spec.hidden_size, layer.moe.top_k
    rows = work.batch.tokens * min(K, plan.ep - 1)
    learns = gradients.halves > 0
    passes = 2 if learns and plan.recompute == "layer" else 1
    forward, backward = rows * (2 * D + 2 * K), rows * (2 * D + K)
    return (passes * forward + learns * backward) * work.batch.item_bytes + passes * INTEGER * (plan.ep - 1)


def expected_dispatch_share(spec: ModelSpec, plan: Plan, work: RankWork) -> float:
    """The expected share of `Traffic.ep` that is really sent, where every expert is chosen equally often.

    A token goes once to each rank that holds one or more of its K experts. If another rank holds n of E experts, none
    of them is among the K with probability C(E - n, K) / C(E, K) (hypergeometric distribution). Mean over this rank's
    layers."""
    moes = [spec.layers[number].moe for run in work.runs for number in run]
    sizes = [size(held) for place, held in enumerate(work.cut.holders) if place != work.at.replica % plan.ep]
    parts = [
        sum(1 - comb(moe.num_experts - n, moe.top_k) / comb(moe.num_experts, moe.top_k) for n in sizes)
        / min(moe.top_k, plan.ep - 1)
        for moe in moes
        if moe is not None
    ]
    return fmean(parts) if parts else 1.0


def _parts(spec: ModelSpec, plan: Plan, work: RankWork, cuts: Sequence[Cut], layers: Sequence[LayerSpec]) -> int:
    """Elements of gradients of which other ranks of the replica have parts, once for each of these ranks."""
    if work.adapter is not None:
        return _parts_of_adapter(spec, plan, work, cuts, work.adapter)
    elements = shares_table(spec, plan, work) * size(work.cut.vocab) * spec.hidden_size
    others = [cut for place, cut in enumerate(cuts) if place != work.at.tp]
    elements += sum(_parts_of_layer(spec, layer, plan, work.cut, other) for layer in layers for other in others)
    return elements + len(others) * plan.sequence * work.ends_model(spec) * spec.hidden_size


def _parts_of_adapter(spec: ModelSpec, plan: Plan, work: RankWork, cuts: Sequence[Cut], adapter: AdapterFacts) -> int:
    """The same beside a model without gradients: A where the outputs of a linear are cut, and B where its inputs are.
    All ranks hold these, and one of them the other."""
    (whole,) = cut_stage(spec, (1,), plan.experts, plan.ep)
    found = [0, 0]
    for place, some in enumerate((cuts, [whole])):
        for cut, run in product(some, work.runs):
            units = (adapter_parameters(spec, number, cut, adapter, work.at.replica) for number in run)
            found[place] += sum(one.elements for unit in units for one in unit)
    return found[0] - found[1]


def _parts_of_layer(spec: ModelSpec, layer: LayerSpec, plan: Plan, cut: Cut, other: Cut) -> int:
    """The same of one layer, with one other rank of the stage."""
    spec, cut = as_layer(spec, layer, cut)
    _, other = as_layer(spec, layer, other)
    D, H, moe = spec.hidden_size, spec.head_dim, layer.moe
    shared = _overlap(cut.kv_heads, other.kv_heads) * H
    of = layer.delta
    if of:
        elements = _overlap(cut.key_heads, other.key_heads) * 2 * of.key_dim * (D + of.kernel) + of.value_dim
    elif spec.latent is None:
        elements = shared * (1 if layer.keys_are_values else 2) * (D + spec.attention_bias)
    else:
        elements = spec.latent.latents * (D + spec.attention_bias) + spec.latent.q_width + spec.latent.width
    elements += {"none": 0, "head": 2 * H, "full": shared}["none" if of else spec.qk_norm]
    if moe is not None:
        elements += D * (moe.num_experts + (moe.shared_width > 0 and moe.shared_gate))
        elements += moe.num_experts * (moe.correction_bias + moe.router_bias)
    beside = moe is not None and moe.beside_mlp
    if moe is not None and beside:
        elements += 3 * D + moe.num_experts
    if plan.sequence:
        biases = spec.output_bias + (spec.mlp_bias and moe is None)
        elements += D * ((4 if spec.norm_order == "both" else 2) + beside + biases)
    return elements


def _overlap(a: Range, b: Range) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def _served(spec: ModelSpec, facts: TrainingFacts, work: RankWork) -> int:
    """Bytes of a replica's gradient to the parameter servers; of an input table only the rows of as many tokens as can
    differ are sent."""
    elements = sum(parameter.elements for unit in work.parameters(spec) for parameter in unit)
    if spec.tied:
        return elements * facts.full_precision_bytes
    rows = min(spec.vocab_size, work.microbatches * work.batch.tokens)
    return (elements - (spec.vocab_size - rows) * spec.hidden_size) * facts.full_precision_bytes + rows * ROW_NUMBER
