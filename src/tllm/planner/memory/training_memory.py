"""Bytes that each rank of a training plan takes at the most, by what they are for.

With Ψ parameters of b bytes on a rank, w bytes of a gradient (4, or 8 of float64), S bytes of optimizer state a
parameter (2 w for AdamW; w more for the wide weights of 16-bit ones), n ranks that share a bucket and M microbatches:

    zero 0, 1   weights Ψ b                 gradients Ψ w                          states Ψ S, Ψ S / n
    zero 2      weights Ψ b                 gradients Ψ w (1 + 1 / n), M > 1       states Ψ S / n
    zero 3      weights Ψ b / n + 2 units   the same                               states Ψ S / n

A tree of additions (`deterministic`) over s shards on a rank keeps log2(s) more sums of gradients, and one less with
a microbatch a shard; replicas that learn on their own (`local`) the anchor and the outer step's momentum, 2 Ψ w.

What a forward pass keeps (`planner.cost.activations`) is there for each microbatch that the schedule has under way.
`working` is an estimate, the largest of what a backward pass has at once and gives back; `heap` is one that was
measured (`planner.memory.heap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tllm.planner.cost.activations import recomputed_bytes
from tllm.planner.cost.buckets import buckets_of, padded_elements, receive_bytes, received, shares_table
from tllm.planner.cost.rank_bytes import Parameter
from tllm.planner.cost.rank_work import RankWork, TrainingFacts, rank_works
from tllm.planner.memory.backward_peak import layer_piece, logits_piece, peak_pass_bytes, workspace_bytes
from tllm.planner.memory.heap import TRAINER_BYTES, heap_bytes, heap_part, largest_heap_piece, runtime_bytes
from tllm.planner.memory.live_activations import live_activation_bytes
from tllm.planner.memory.snapshots import save_bytes, snapshot_bytes
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes at the most. `on_disk` is not in memory and not in the `total`.

    `optimizer` are the states, `wide_weights` what is updated in the place of 16-bit weights; `buffers` are what
    groups receive into; `runtime` is the process before any of it; `copies` are of the last steps
    (`planner.memory.snapshots`).
    `waiting_sums` are of gradients, until their turn in the tree comes; `outer` are the anchor and its momentum.
    `heap` is what was freed and is of no use to what comes next; `saving` what a save copies, to write it meanwhile.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int
    wide_weights: int
    activations: int = 0
    logits: int = 0
    working: int = 0
    buffers: int = 0
    on_disk: int = 0
    runtime: int = TRAINER_BYTES
    copies: int = 0
    waiting_sums: int = 0
    outer: int = 0
    heap: int = 0
    saving: int = 0

    @property
    def total(self) -> int:
        state = self.weights + self.gradients + self.optimizer + self.wide_weights + self.waiting_sums + self.outer
        passes = self.activations + self.logits + self.working + self.heap
        return state + passes + self.buffers + self.runtime + self.copies + self.saving


def training_bytes(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, replicas: Sequence[int] | None = None
) -> list[RankMemory]:
    """The account of every rank of a plan, or of those of some replicas; servers last.

    PlanError where the plan does not fit the model.
    """
    works = rank_works(spec, plan, facts, replicas)
    found = [_computing(spec, plan, facts, work) for work in works]
    copies = snapshot_bytes(spec, plan, facts, works)
    saved = save_bytes(spec, plan, facts, works)
    found = [replace(one, copies=a, saving=b) for one, a, b in zip(found, copies, saved, strict=True)]
    return found + _servers(spec, plan, facts, works[0])


def _computing(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> RankMemory:
    units = work.parameters(spec)
    everything = [one for unit in units for one in unit]
    whole = sum(map(padded_elements, everything))
    zero = plan.zero if work.replicas > 1 else 0
    mine = sum(_range(one, work) for one in everything) if zero else whole
    b, w = facts.item_bytes, facts.full_precision_bytes
    state = 0 if plan.servers else mine
    optimizer, wide = state * w * facts.states, state * w * (b < w)
    used = [sum(padded_elements(one) for one in unit) * b for unit in units] if zero == 3 else []
    disk = plan.offload == "disk"
    kept, beside = live_activation_bytes(spec, plan, work), workspace_bytes(spec, work)
    gradients = [one.elements * b for one in everything]
    passes = peak_pass_bytes(spec, work, kept, max(gradients), used)
    passing = [logits_piece(spec, work), *gradients]
    in_heap = heap_part(kept.activations + beside, layer_piece(spec, work)) + heap_part(kept.logits, passing[0])
    holes = _pieces(spec, plan, facts, work, passing, used, in_heap)
    return RankMemory(
        rank=work.rank,
        weights=mine * b + passes.gathered if zero == 3 else whole * b,
        gradients=_gradients(zero, whole, mine, work, facts),
        optimizer=0 if disk else optimizer,
        wide_weights=0 if disk else wide,
        activations=passes.activations,
        logits=passes.logits,
        working=beside + passes.gradients,
        buffers=_buffers(spec, plan, facts, work, max(passing)),
        on_disk=(optimizer + wide) if disk else 0,
        runtime=runtime_bytes(spec, plan, work.rank, work.runs),
        waiting_sums=_waiting_sums(whole, work, facts),
        outer=2 * whole * w if facts.local else 0,
        heap=heap_bytes(in_heap, holes, b < w) + _again(spec, plan, work),
    )


def _range(one: Parameter, work: RankWork) -> int:
    """This rank's part of a parameter that is spread over those that share it: as even as can be."""
    return -(-padded_elements(one) // (work.expert_replicas if one.spread else work.replicas))


def _gradients(zero: int, whole: int, mine: int, work: RankWork, facts: TrainingFacts) -> int:
    if zero < 2:
        return whole * facts.full_precision_bytes
    if work.microbatches > 1:
        return (whole + mine) * facts.full_precision_bytes
    return mine * facts.full_precision_bytes + min(whole * facts.full_precision_bytes, 2 * facts.bucket_bytes)


def _waiting_sums(whole: int, work: RankWork, facts: TrainingFacts) -> int:
    """Where each microbatch is a shard, the last level lasts for as long as its bucket waits to be added."""
    total = work.microbatches * work.replicas
    shards = max(1, (total & -total) // work.replicas)
    if not facts.deterministic or shards == 1:
        return 0
    levels, size = shards.bit_length() - 1, whole * facts.full_precision_bytes
    return levels * size if shards < work.microbatches else (levels - 1) * size + min(size, 2 * facts.bucket_bytes)


def _buffers(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, longest: int) -> int:
    """Rooms for the others' parts of the longest sum over tp, of a table, and over the ranks that share gradients.

    A table's sum comes when all passes are over: where its rooms are no longer than the `longest` piece that these gave
    back, they take nothing more. Of states on a disk those of one bucket at a time are in memory.
    """
    ordinary, spread = (buckets_of(spec, plan, facts, work, spread) for spread in (False, True))
    table = receive_bytes(ordinary[-1:], 2) if shares_table(spec, plan, work) else 0
    if table <= longest:
        table = 0
    over_dp = receive_bytes(ordinary, work.replicas, plan.zero > 0) + receive_bytes(
        spread, work.expert_replicas, plan.zero > 0
    )
    updated = (
        (facts.states + (facts.item_bytes < facts.full_precision_bytes)) * max(ordinary)
        if plan.offload == "disk"
        else 0
    )
    return received(layer_piece(spec, work), work.tp) + table + over_dp + updated


def _pieces(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    work: RankWork,
    passing: Sequence[int],
    units: Sequence[int],
    room: int,
) -> list[int]:
    """The largest that leave a hole: of those `passing`, logits first and then each parameter's gradient; with `zero`
    of 2 or more a bucket, and of 3 the weights of one of `units`.

    A longer one lies in the heap only where passes left it as much `room`, all in one: so do weights that are there
    several times in each microbatch, and all where layers are worked out again. A way back in two halves has the logits
    of one more microbatch (measured).
    """
    found = [largest_heap_piece(passing) if plan.recompute == "none" else min(max(passing), room)]
    if plan.schedule == "zero_bubble":
        found.append(passing[0])
    if plan.zero >= 2 and work.replicas > 1:
        found.append(largest_heap_piece(buckets_of(spec, plan, facts, work, False)))
    if units:
        found.append(min(max(units), room))
    return found


def _again(spec: ModelSpec, plan: Plan, work: RankWork) -> int:
    """What working out a layer again leaves behind between what passes keep: room of the largest, in many pieces."""
    layers = (number for run in work.runs for number in run)
    most = max(recomputed_bytes(spec, number, work.cut, work.batch, plan.recompute) for number in layers)
    return heap_part(most, layer_piece(spec, work))


def _servers(spec: ModelSpec, plan: Plan, facts: TrainingFacts, replica: RankWork) -> list[RankMemory]:
    """Servers hold ranges of weights and states, and while they come every replica's gradients of these."""
    first = plan.replicas * plan.replica_size
    whole = sum(padded_elements(one) for unit in replica.parameters(spec) for one in unit)
    ranges = [whole * (i + 1) // plan.servers - whole * i // plan.servers for i in range(plan.servers)]
    return [
        RankMemory(
            rank=first + index,
            weights=mine * facts.item_bytes,
            gradients=mine * facts.full_precision_bytes * plan.replicas,
            optimizer=mine * facts.full_precision_bytes * facts.states,
            wide_weights=mine * facts.full_precision_bytes * (facts.item_bytes < facts.full_precision_bytes),
            saving=mine
            * (
                facts.item_bytes
                + facts.full_precision_bytes * (facts.states + (facts.item_bytes < facts.full_precision_bytes))
            ),
        )
        for index, mine in enumerate(ranges)
    ]
