"""Bytes that each rank of a training plan takes at most, by kind.

With Ψ parameters of b bytes on a rank, w bytes of a gradient element (4, or 8 of float64), S bytes of optimizer state
per parameter (2 w for AdamW, and w more for the float32 master weights of 16-bit ones), n ranks that share a bucket and
M microbatches, as in ZeRO (Rajbhandari et al., 1910.02054, section 5):

    zero 0, 1   weights Ψ b                 gradients Ψ w                          states Ψ S, Ψ S / n
    zero 2      weights Ψ b                 gradients Ψ w (1 + 1 / n), M > 1       states Ψ S / n
    zero 3      weights Ψ b / n + 2 units   the same                               states Ψ S / n

A tree of additions (`deterministic`) over s shards on a rank keeps log2(s) more sums of gradients, and one less with
one microbatch per shard. Replicas that train on their own between outer steps (`local`) keep the weights of the last
outer step and its momentum, 2 Ψ w.

Of a LoRA adapter Ψ are its numbers, and the model beside it takes its weights and nothing more.

Activation memory (`planner.cost.activations`) counts for each microbatch that the schedule has under way. `working` is
an estimate: the largest workspace of a backward pass. `heap` is an estimate by measured constants
(`planner.memory.heap`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tllm.planner.cost.activations import recomputed_bytes
from tllm.planner.cost.buckets import buckets_of, padded_elements, range_elements, receive_bytes, received, shares_table
from tllm.planner.cost.grid_work import hidden_part
from tllm.planner.cost.rank_bytes import as_learned, end_bytes, layer_bytes
from tllm.planner.cost.rank_work import RankWork, TrainingFacts, deal_microbatches, rank_works
from tllm.planner.memory.backward_peak import layer_piece, logits_piece, peak_pass_bytes, workspace_bytes
from tllm.planner.memory.grid_products import product_bytes
from tllm.planner.memory.heap import TRAINER_BYTES, heap_bytes, heap_part, largest_heap_piece, runtime_bytes
from tllm.planner.memory.live_activations import live_activation_bytes
from tllm.planner.memory.role_memory import role_memory
from tllm.planner.memory.snapshots import rank_snapshots, save_bytes
from tllm.spec.hf_config import rounded
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.process_groups import server_ranks


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes at most. Beside its number all fields are bytes, and all but `on_disk` add up to the `total`."""

    rank: int
    weights: int
    gradients: int
    optimizer: int
    """States of the optimizer."""
    wide_weights: int
    """Master weights: the float32 copies that are updated in the place of 16-bit weights."""
    activations: int = 0
    logits: int = 0
    working: int = 0
    """Workspace of backward passes, and gradients on their way to their buckets."""
    buffers: int = 0
    """What groups receive messages into."""
    on_disk: int = 0
    """Optimizer states and master weights that are not in memory."""
    runtime: int = TRAINER_BYTES
    """The process before any tensor."""
    copies: int = 0
    """Snapshots of the last steps (`planner.memory.snapshots`)."""
    waiting_sums: int = 0
    """Sums of gradients that wait until the tree of additions needs them."""
    outer: int = 0
    """The weights of the last outer step and its momentum."""
    heap: int = 0
    """Freed memory that is of no use to what comes next (`planner.memory.heap`)."""
    saving: int = 0
    """What saving a checkpoint copies, to write it while training goes on."""
    cache: int = 0
    """Keys and values of completions that the run samples (`planner.memory.role_memory`)."""
    reference: int = 0
    """The weights of a reference model."""
    teacher: int = 0
    """A teacher beside the student."""
    reward: int = 0
    """A reward model in the process of rank 0."""

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer + self.wide_weights + self.waiting_sums + self.outer
        passes = self.activations + self.logits + self.working + self.heap
        roles = self.cache + self.reference + self.teacher + self.reward
        return state + passes + roles + self.buffers + self.runtime + self.copies + self.saving


def training_bytes(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    replicas: Sequence[int] | None = None,
    hosts: tuple[str, ...] = (),
) -> list[RankMemory]:
    """The memory of every rank of a plan, or of those of some replicas; parameter servers last.

    `hosts`: the machines of all ranks; each has its own where these are not known. Raises PlanError where the plan does
    not fit the model.
    """
    copies = rank_snapshots(spec, plan, facts, hosts)
    spec, facts = as_learned(spec, facts.adapter), facts.as_large_as_may_be
    some = range(plan.replicas) if replicas is None else replicas
    alike = _representatives(plan, facts, some)
    works = rank_works(spec, plan, facts, list(dict.fromkeys(alike)))
    saved = save_bytes(spec, plan, facts, works)
    ranks = [
        replace(_computing(spec, plan, facts, work), saving=saving) for work, saving in zip(works, saved, strict=True)
    ]
    size = plan.replica_size
    of_replica = {works[at].at.replica: ranks[at : at + size] for at in range(0, len(ranks), size)}
    every = [
        replace(memory, rank=rank, copies=copies[rank].kept)
        for replica, one in zip(some, alike, strict=True)
        for rank, memory in enumerate(of_replica[one], replica * size)
    ]
    return every + _servers(spec, plan, facts, works[0])


@lru_cache(8)
def rank_totals(spec: ModelSpec, plan: Plan, facts: TrainingFacts, hosts: tuple[str, ...] = ()) -> tuple[int, ...]:
    """The `total` of every rank of a plan, as `training_bytes` has it, fast for many replicas."""
    alike = _representatives(plan, facts, range(plan.replicas))
    looked_at, size = list(dict.fromkeys(alike)), plan.replica_size
    totals = [rank.total - rank.copies for rank in training_bytes(spec, plan, facts, looked_at, hosts)]
    of_replica = {replica: totals[at * size : (at + 1) * size] for at, replica in enumerate(looked_at)}
    totals = [total for replica in alike for total in of_replica[replica]] + totals[len(looked_at) * size :]
    copies = rank_snapshots(spec, plan, facts, hosts)
    return tuple(total + snapshots.kept for total, snapshots in zip(totals, copies, strict=True))


def _representatives(plan: Plan, facts: TrainingFacts, replicas: Sequence[int]) -> list[int]:
    """For each of these replicas the first of them that holds as much: one with as many microbatches, but for replica
    0, whose first rank reads the rows. Where experts are divided over replicas, each stands for itself."""
    if plan.ep > 1:
        return list(replicas)
    counts, first = deal_microbatches(facts.microbatches, plan.dp), dict[tuple[int, bool], int]()
    return [first.setdefault((counts[replica], replica == 0), replica) for replica in replicas]


def _computing(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> RankMemory:
    """The memory of a rank that computes, without snapshots and saves."""
    units = work.learned(spec)
    parameters = [parameter for unit in units for parameter in unit]
    whole = sum(map(padded_elements, parameters))
    zero = plan.zero if work.replicas > 1 else 0
    mine = sum(range_elements(parameter, work) for parameter in parameters) if zero else whole
    b, w = facts.learned_bytes, facts.full_precision_bytes
    state = 0 if plan.servers else mine
    optimizer, full_precision_weights = state * w * facts.states, state * w * (b < w)
    unit_bytes = [sum(padded_elements(parameter) for parameter in unit) * b for unit in units] if zero == 3 else []
    on_disk = plan.offload == "disk"
    shape = plan.grid_of(work.at.stage)
    hidden, products = hidden_part(spec, shape), product_bytes(spec, shape, work)
    live, workspace = live_activation_bytes(hidden, plan, work), workspace_bytes(hidden, work)
    gradients = [parameter.elements * b for parameter in parameters]
    peak = peak_pass_bytes(hidden, work, live, max(gradients, default=0), unit_bytes, products)
    passing = [logits_piece(spec, work), *gradients]
    in_heap = heap_part(live.activations + workspace, layer_piece(hidden, work)) + heap_part(live.logits, passing[0])
    holes = _hole_sizes(spec, plan, facts, work, passing, unit_bytes, in_heap)
    roles = role_memory(spec, facts, work)
    return RankMemory(
        rank=work.rank,
        weights=(mine * b + peak.gathered if zero == 3 else whole * b) + _frozen_bytes(spec, facts, work),
        gradients=_gradients(zero, whole, mine, work, facts),
        optimizer=0 if on_disk else optimizer,
        wide_weights=0 if on_disk else full_precision_weights,
        activations=peak.activations,
        logits=peak.logits,
        working=max(workspace + peak.gradients, roles.sampling - peak.activations - peak.logits),
        buffers=_buffers(hidden, plan, facts, work, max(passing)) + products.received,
        on_disk=(optimizer + full_precision_weights) if on_disk else 0,
        runtime=runtime_bytes(spec, plan, work.rank, work.runs),
        waiting_sums=_waiting_sums(whole, work, facts),
        outer=2 * whole * w if facts.local else 0,
        heap=heap_bytes(in_heap, holes, facts.item_bytes < w) + _recompute_holes(hidden, plan, work),
        cache=roles.cache,
        reference=roles.reference,
        teacher=roles.teacher,
        reward=roles.reward,
    )


def _frozen_bytes(spec: ModelSpec, facts: TrainingFacts, work: RankWork) -> int:
    """Bytes of the model beside an adapter, which nothing is kept of but its weights."""
    if facts.adapter is None:
        return 0
    wish, item = facts.adapter.quantize, facts.item_bytes
    few_bits = spec.quantization if wish is None else rounded(wish, spec.tied)
    held = replace(spec, quantization=None if facts.dtype == "float64" else few_bits)  # in float64 all are plain
    layers = sum(layer_bytes(held, number, work.cut, item) for run in work.runs for number in run)
    return math.ceil(layers + sum(sum(end_bytes(held, run, work.cut, item)) for run in work.runs))


def _gradients(zero: int, whole: int, mine: int, work: RankWork, facts: TrainingFacts) -> int:
    """Bytes of gradients, `whole` elements of which this rank keeps `mine`; with one microbatch ZeRO 2 and 3 pass each
    bucket on as soon as it is full, and two are under way."""
    if zero < 2:
        return whole * facts.full_precision_bytes
    if work.microbatches > 1:
        return (whole + mine) * facts.full_precision_bytes
    return mine * facts.full_precision_bytes + min(whole * facts.full_precision_bytes, 2 * facts.bucket_bytes)


def _waiting_sums(whole: int, work: RankWork, facts: TrainingFacts) -> int:
    """Bytes of sums of gradients in a tree of additions. Where each microbatch is a shard of its own, the last level
    lasts only until its bucket is added."""
    total = work.microbatches * work.replicas
    shards = max(1, (total & -total) // work.replicas)
    if not facts.deterministic or shards == 1:
        return 0
    levels, size = shards.bit_length() - 1, whole * facts.full_precision_bytes
    return levels * size if shards < work.microbatches else (levels - 1) * size + min(size, 2 * facts.bucket_bytes)


def _buffers(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, longest: int) -> int:
    """Receive buffers: of the longest all-reduce over tp, of a table's, and of those over the ranks that share
    gradients.

    A table is all-reduced when all passes are over: where its buffers are no longer than the `longest` piece that these
    gave back, they take nothing more. Of states on a disk those of one bucket at a time are in memory.
    """
    ordinary, spread = (buckets_of(spec, plan, facts, work, spread) for spread in (False, True))
    table = receive_bytes(ordinary[-1:], 2) if shares_table(spec, plan, work) else 0
    if table <= longest:
        table = 0
    groups, updated = ((ordinary, work.replicas), (spread, work.expert_replicas)), 0
    over_dp = sum(receive_bytes(buckets, ranks, plan.zero > 0) for buckets, ranks in groups)
    if plan.offload == "disk":
        ranges = (size // (ranks if plan.zero else 1) for buckets, ranks in groups for size in buckets)
        updated = (facts.states + facts.float32_weights) * max(ranges, default=0)
    of_layers = 0 if plan.grid else received(layer_piece(spec, work), work.tp)
    return of_layers + table + over_dp + updated


def _hole_sizes(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    work: RankWork,
    passing: Sequence[int],
    unit_bytes: Sequence[int],
    room: int,
) -> list[int]:
    """Bytes of the largest tensors that come and go in the heap, each of which leaves a hole.

    They are: the largest of those `passing` (logits first, then each parameter's gradient); with ZeRO 2 and 3 a bucket,
    and with ZeRO 3 the weights of one unit (`unit_bytes`). A tensor that is mapped by itself leaves no hole, unless
    passes left `room` for it in one piece. That happens to gathered weights, which come several times in each
    microbatch, and to all tensors where layers are recomputed. A split backward pass has the logits of one more
    microbatch (measured).
    """
    holes = [largest_heap_piece(passing) if plan.recompute == "none" else min(max(passing), room)]
    if plan.schedule == "zero_bubble":
        holes.append(passing[0])
    if plan.zero >= 2 and work.replicas > 1:
        holes.append(largest_heap_piece(buckets_of(spec, plan, facts, work, False)))
    if unit_bytes:
        holes.append(min(max(unit_bytes), room))
    return holes


def _recompute_holes(spec: ModelSpec, plan: Plan, work: RankWork) -> int:
    """Bytes that recomputing a layer leaves behind between what passes keep: as many as the largest has, in pieces."""
    layers = (number for run in work.runs for number in run)
    largest = max(recomputed_bytes(spec, number, work.cut, work.batch, plan.recompute) for number in layers)
    return heap_part(largest, layer_piece(spec, work))


def _servers(spec: ModelSpec, plan: Plan, facts: TrainingFacts, replica: RankWork) -> list[RankMemory]:
    """Parameter servers hold ranges of weights and states, and every replica's gradients of these while they arrive."""
    whole = sum(padded_elements(parameter) for unit in replica.parameters(spec) for parameter in unit)
    b, w = facts.item_bytes, facts.full_precision_bytes
    servers = list[RankMemory]()
    for index, rank in enumerate(server_ranks(plan)):
        mine = whole * (index + 1) // plan.servers - whole * index // plan.servers
        weights, optimizer, wide_weights = mine * b, mine * w * facts.states, mine * w * (b < w)
        servers.append(
            RankMemory(
                rank=rank,
                weights=weights,
                gradients=mine * w * plan.replicas,
                optimizer=optimizer,
                wide_weights=wide_weights,
                saving=weights + optimizer + wide_weights,
            )
        )
    return servers
