"""Bytes that each rank of a training plan takes at the most, by what they are for.

With Ψ parameters of b bytes on a rank, w bytes of a gradient (4, or 8 of float64), S bytes of optimizer state a
parameter (2 w for AdamW; w more for the wide weights of 16-bit ones), n ranks that share a bucket and M microbatches:

    zero 0, 1   weights Ψ b                 gradients Ψ w                          states Ψ S, Ψ S / n
    zero 2      weights Ψ b                 gradients Ψ w (1 + 1 / n), M > 1       states Ψ S / n
    zero 3      weights Ψ b / n + 2 units   the same                               states Ψ S / n

A tree of additions (`deterministic`) over s shards on a rank keeps log2(s) more sums of gradients, and one less with
a microbatch a shard; replicas that learn on their own (`local`) the anchor and the outer step's momentum, 2 Ψ w.

What a forward pass keeps (`planner.activations`) is there for each microbatch that the schedule has under way.
`working` is an estimate, the largest of what a backward pass has at once and gives back; `heap` is one that was
measured (`planner.heap`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from tllm.planner.activations import (
    again_bytes,
    halves_bytes,
    logits_bytes,
    run_bytes,
)
from tllm.planner.backward import beside_bytes, gradient_bytes, logits_piece
from tllm.planner.buckets import buckets_of, padded, received, rooms, shares_table
from tllm.planner.heap import LARGEST_KEPT, heap_bytes, largest_kept, symbols_bytes
from tllm.planner.mirrored import copies_of, saved_of
from tllm.planner.parameters import Parameter
from tllm.planner.ranks import RankWork, TrainingFacts, built, work_of
from tllm.planner.room import RUNTIME_BYTES
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan
from tllm.spec.schedule import Depth, Op, Schedule


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes at the most. `on_disk` is not in memory and not in the `total`.

    `optimizer` are the states, `wide_weights` what is updated in the place of 16-bit weights; `buffers` are what
    groups receive into; `runtime` is the process before any of it; `copies` are of the last steps (`planner.mirrored`).
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
    runtime: int = RUNTIME_BYTES
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
    works = work_of(spec, plan, facts, replicas)
    found = [_computing(spec, plan, facts, work) for work in works]
    copies = copies_of(spec, plan, facts, works)
    saved = saved_of(spec, plan, facts, works)
    found = [replace(one, copies=a, saving=b) for one, a, b in zip(found, copies, saved, strict=True)]
    return found + _servers(spec, plan, facts, works[0])


def _computing(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> RankMemory:
    units = work.parameters(spec)
    everything = [one for unit in units for one in unit]
    whole = sum(map(padded, everything))
    zero = plan.zero if work.replicas > 1 else 0
    mine = sum(_range(one, work) for one in everything) if zero else whole
    b, w = facts.item, facts.wide
    state = 0 if plan.servers else mine
    optimizer, wide = state * w * facts.states, state * w * (b < w)
    weights = whole * b
    if zero == 3:
        used = [sum(padded(one) for one in unit) for unit in units]
        weights = mine * b + max((a + c for a, c in pairwise(used)), default=sum(used)) * b
    disk = plan.offload == "disk"
    activations, logits = kept_bytes(spec, plan, work)
    beside, gradient = beside_bytes(spec, work), gradient_bytes(spec, work, everything)
    in_heap = activations + beside + (logits if logits_piece(spec, work) <= LARGEST_KEPT else 0)
    return RankMemory(
        rank=work.rank,
        weights=weights,
        gradients=_gradients(zero, whole, mine, work, facts),
        optimizer=0 if disk else optimizer,
        wide_weights=0 if disk else wide,
        activations=activations,
        logits=logits,
        working=beside + gradient,
        buffers=_buffers(spec, plan, facts, work),
        on_disk=(optimizer + wide) if disk else 0,
        runtime=RUNTIME_BYTES + symbols_bytes(spec, plan, work.runs),
        waiting_sums=_waiting_sums(whole, work, facts),
        outer=2 * whole * w if facts.local else 0,
        heap=heap_bytes(in_heap, _pieces(spec, plan, facts, work)) + _again(spec, plan, work),
    )


def kept_bytes(spec: ModelSpec, plan: Plan, work: RankWork) -> tuple[int, int]:
    """What passes under way keep, (of layers, of logits), where a step has most of both together."""
    if not work.microbatches:
        return 0, 0
    kept = [run_bytes(spec, run, work.cut, work.batch, plan.recompute) for run in work.runs]
    again = [[again_bytes(spec, n, work.cut, work.batch, plan.recompute) for n in run] for run in work.runs]
    halves = [
        halves_bytes(spec, run, work.cut, work.batch) + sum(made) for run, made in zip(work.runs, again, strict=True)
    ]
    once = [max(made) for made in again]
    of_logits = [_logits(spec, run, work) for run in work.runs]
    sizes = (tuple(kept), tuple(halves), tuple(once), tuple(of_logits))
    return _most(plan.schedule, plan.pp, work.microbatches, plan.depth, plan.chunks, work.at.stage, *sizes)


@lru_cache(256)
def _most(
    order: str, pp: int, microbatches: int, depth: Depth, chunks: int, stage: int, *sizes: tuple[int, ...]
) -> tuple[int, int]:
    """Of one stage; its ranks are mostly alike."""
    schedule = built(order, pp, microbatches, depth, chunks)
    live = _Live(schedule, stage, *sizes)
    for op in schedule.lists[stage]:
        live.play(op)
    return live.most


class _Live:
    """Adds up what is kept, op by op, and remembers when it was most."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        kept: tuple[int, ...],
        halves: tuple[int, ...],
        once: tuple[int, ...],
        logits: tuple[int, ...],
    ) -> None:
        self.schedule, self.stage = schedule, stage
        self.kept, self.halves, self.once, self.logits = kept, halves, once, logits
        self.now, self.of_logits = 0, 0
        self.most = (0, 0)

    def play(self, op: Op) -> None:
        """`backward_input` at the model's start does nothing: the whole pass waits for `backward_weight`."""
        kept, logits, half = self.kept[op.chunk], self.logits[op.chunk], self.halves[op.chunk]
        waits = op.kind != "forward" and self.schedule.sends(self.stage, op._replace(kind="backward")) is None
        if op.kind == "forward":
            self._move(kept, logits)
        elif op.kind == "backward_weight" and not waits:
            self._move(-kept - half, -logits)
        elif op.kind == "backward_input":
            self._move(0 if waits else half, 0)
        else:
            # Logits are gone when the first layer from the end is worked out again.
            self._move(self.once[op.chunk], -logits)
            self._move(-kept - self.once[op.chunk], 0)

    def _move(self, kept: int, logits: int) -> None:
        self.now, self.of_logits = self.now + kept, self.of_logits + logits
        self.most = max(self.most, (self.now, self.of_logits), key=sum)


def _range(one: Parameter, work: RankWork) -> int:
    """This rank's part of a parameter that is spread over those that share it: as even as can be."""
    return -(-padded(one) // (work.expert_replicas if one.spread else work.replicas))


def _gradients(zero: int, whole: int, mine: int, work: RankWork, facts: TrainingFacts) -> int:
    if zero < 2:
        return whole * facts.wide
    if work.microbatches > 1:
        return (whole + mine) * facts.wide
    return mine * facts.wide + min(whole * facts.wide, 2 * facts.bucket_bytes)


def _waiting_sums(whole: int, work: RankWork, facts: TrainingFacts) -> int:
    """Where each microbatch is a shard, the last level lasts for as long as its bucket waits to be added."""
    total = work.microbatches * work.replicas
    shards = max(1, (total & -total) // work.replicas)
    if not facts.deterministic or shards == 1:
        return 0
    levels, size = shards.bit_length() - 1, whole * facts.wide
    return levels * size if shards < work.microbatches else (levels - 1) * size + min(size, 2 * facts.bucket_bytes)


def _logits(spec: ModelSpec, run: range, work: RankWork) -> int:
    return logits_bytes(spec, work.cut, work.batch) if run.stop == spec.num_layers else 0


def _buffers(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> int:
    """Rooms for the others' parts of the longest sum over tp, of a table, and over the ranks that share gradients.

    A table's sum comes when all passes are over: where its rooms fit into the largest hole that these leave, which
    `_pieces` counts, they take nothing more. Of states on a disk those of one bucket at a time are in memory.
    """
    message = work.batch.tokens * spec.hidden_size * facts.item
    ordinary, spread = (buckets_of(spec, plan, facts, work, spread) for spread in (False, True))
    table = rooms(ordinary[-1:], 2) if shares_table(spec, plan, work) else 0
    if table <= max(_pieces(spec, plan, facts, work)):
        table = 0
    over_dp = rooms(ordinary, work.replicas, plan.zero > 0) + rooms(spread, work.expert_replicas, plan.zero > 0)
    updated = (facts.states + (facts.item < facts.wide)) * max(ordinary) if plan.offload == "disk" else 0
    return received(message, work.tp) + table + over_dp + updated


def _pieces(spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork) -> list[int]:
    """The largest that come and go: of passes; with `zero` of 2 or more a bucket, and of 3 a unit's weights.

    These are there several times in each microbatch, and lie in the heap whenever what is free there has room for them.
    """
    units = work.parameters(spec)
    gradients = (one.elements * facts.item for unit in units for one in unit)
    found = [largest_kept((logits_piece(spec, work), *gradients))]
    if plan.zero >= 2 and work.replicas > 1:
        found.append(largest_kept(buckets_of(spec, plan, facts, work, False)))
    if plan.zero == 3 and work.replicas > 1:
        found.append(max(sum(map(padded, unit)) * facts.item for unit in units))
    return found


def _again(spec: ModelSpec, plan: Plan, work: RankWork) -> int:
    """What working out a layer again leaves behind between what passes keep: room of the largest, in many pieces."""
    layers = (number for run in work.runs for number in run)
    return max(again_bytes(spec, number, work.cut, work.batch, plan.recompute) for number in layers)


def _servers(spec: ModelSpec, plan: Plan, facts: TrainingFacts, replica: RankWork) -> list[RankMemory]:
    """Servers hold ranges of weights and states, and while they come every replica's gradients of these."""
    first = plan.replicas * plan.replica_size
    whole = sum(padded(one) for unit in replica.parameters(spec) for one in unit)
    ranges = [whole * (i + 1) // plan.servers - whole * i // plan.servers for i in range(plan.servers)]
    return [
        RankMemory(
            rank=first + index,
            weights=mine * facts.item,
            gradients=mine * facts.wide * plan.replicas,
            optimizer=mine * facts.wide * facts.states,
            wide_weights=mine * facts.wide * (facts.item < facts.wide),
            saving=mine * (facts.item + facts.wide * (facts.states + (facts.item < facts.wide))),
        )
        for index, mine in enumerate(ranges)
    ]
