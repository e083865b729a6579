"""`TrainingFacts`: the numbers of a training job. `RankWork`: what one rank of a plan holds and computes of it.

All costs of a training step are derived from these two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from tllm.core.errors import PlanError
from tllm.planner.cost.activations import Microbatch
from tllm.planner.cost.flops import BACKWARD
from tllm.planner.cost.grid_work import grid_microbatch, grid_parameters
from tllm.planner.cost.rank_bytes import (
    ITEM_BYTES,
    AdapterFacts,
    Parameter,
    adapted_linears,
    adapter_parameters,
    check_dtype,
    lowest_adapted_layer,
    run_parameters,
)
from tllm.planner.cost.serving_load import SamplingFacts
from tllm.spec.cut import Cut, cut_stage, stage_cuts
from tllm.spec.grid.grid_shape import GridShape
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.pipeline_schedule import Depth, Schedule, build
from tllm.spec.plan import Coordinates, Plan

BUCKET_BYTES = 16 * 1024 * 1024
"""Bytes of gradients that are all-reduced in one message."""

INT8_BLOCK = 256
"""Elements of a compressed gradient that share one scale (`training.gradients.compressed_reduction`)."""


@dataclass(frozen=True)
class ProjectionFacts:
    """Hidden states of a student, numbered as its job has them, each learned with a projection to `width` columns."""

    hidden_states: tuple[int, ...]
    width: int

    def parameters(self, spec: ModelSpec, runs: Sequence[range]) -> list[Parameter]:
        """Of the projections that a rank with these layers holds."""
        held = {number for run in runs for number in (*run, *([run.stop] if run.stop == spec.num_layers else []))}
        here = [number for number in self.hidden_states if spec.hidden_state(number) in held]
        return [Parameter(spec.hidden_size * self.width)] * len(here)


@dataclass(frozen=True)
class JudgeFacts:
    """A teacher or a reward model: it judges each row alone, in a forward pass by one device, or several together."""

    spec: ModelSpec
    dtype: str
    tokens: int
    """Tokens that are judged in a step."""
    row: int
    """Tokens of a row, which it judges at once."""
    told: int = 0
    """Bytes that it holds of each token to tell it: hidden states, and log-probabilities where all of them are told."""
    devices: tuple[int, ...] = ()
    """Devices that judge and do not train; left out, that of rank 0 does."""
    plan: Plan | None = None
    """By which so many of these devices in a row divide one model; left out, each has a whole one."""

    @property
    def size(self) -> int:
        """Devices that compute one model."""
        return 1 if self.plan is None else self.plan.world_size

    @property
    def whole(self) -> JudgeFacts:
        """The same on the device of rank 0, which shares it with nobody."""
        return replace(self, devices=(), plan=None)

    @property
    def answered(self) -> int:
        """Tokens of a row whose logits are computed: a reward model scores the last."""
        return 1 if self.spec.num_labels else self.row


class SharedPrompts(NamedTuple):
    """Prompts that a microbatch has once for all of their completions (`training.step.shared_prompts`), whoever samples
    these, or for both replies of a pair: tokens of a prompt and of a completion, as long as they may be, and
    completions of each prompt. `of_row`: completions in a row, which pairs fill; how long those are is known on average
    alone."""

    prompt: int
    completion: int
    completions: int
    of_row: int = 1


@dataclass(frozen=True)
class TrainingFacts:
    """What of a training job decides what a step costs."""

    seq_len: int
    """Tokens of a row."""
    global_batch_size: int
    """Rows of a step, over all replicas."""
    microbatch_size: int = 1
    """Rows of a microbatch."""
    dtype: str = "float32"
    """Of weights and activations."""
    states: int = 2
    """Tensors of the optimizer that are as large as the weights: 2 for AdamW."""
    documents: tuple[int, ...] = ()
    """Tokens of each document in one row, when they are known; left out, one document fills it."""
    mean_lengths: bool = False
    """Whether that, and how many are predicted, is so on an average alone."""
    row_tokens: int = 0
    """Tokens of a row with those that are not learned from, where that is not `seq_len` (0)."""
    target_tokens: int | None = None
    """How many of a row's tokens the loss is computed for; left out, all."""
    bucket_bytes: int = BUCKET_BYTES
    """Bytes of gradients that are all-reduced in one message."""
    mirror_steps: int = 0
    """After so many steps each, the training state is replicated to another rank's memory; 0 never."""
    deterministic: bool = False
    """Whether gradients are added as one tree, whatever the plan (`training.gradients.accumulation_order`)."""
    local_steps: int = 1
    """Steps that replicas take on their own before an outer step of all of them (`training.sync.diloco`); 1: each step
    is one of all."""
    compression: str = "none"
    """How gradients travel, as the job's `gradient_compression` says."""
    powersgd_rank: int = 1
    """Columns and rows that "powersgd" sends of each matrix."""
    residual: bool = False
    """Whether each replica keeps what its compressed gradients left out (`training.gradients.error_feedback`)."""
    late: bool = False
    """Whether gradients are applied one step late, so that their all-reduce overlaps with the next step."""
    adapter: AdapterFacts | None = None
    """The LoRA adapter that is trained; left out, the model itself is."""
    projections: ProjectionFacts | None = None
    """What is learned beside the model of a teacher's hidden states."""
    sampling: SamplingFacts | None = None
    """What the run samples of its own model, with the ranks that train it."""
    reference: bool = False
    """Whether each rank holds its part of a reference model (GRPO's `beta`); one under an adapter is the model beside
    it, and takes time alone."""
    teacher: JudgeFacts | None = None
    """The teacher in the process of rank 0."""
    reward: JudgeFacts | None = None
    """The reward model that scores what is sampled."""
    shared_prompts: SharedPrompts | None = None
    """The prompts that completions in a microbatch share; left out, each has its own."""
    value_pass: bool = False
    """Whether a pass forward that is to be learned from is computed a second time, without gradients: for the engine's
    bits (`training.step.invariant_layers`), or with other replies that are as long (KTO)."""

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        for name in ("seq_len", "global_batch_size", "microbatch_size"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", f"give {name} of 1 or more")

    @property
    def item_bytes(self) -> int:
        """Bytes of one number in weights and activations."""
        return ITEM_BYTES[self.dtype]

    @property
    def full_precision_bytes(self) -> int:
        """Bytes of one number in gradients, optimizer states and master weights: float32, or float64 of float64."""
        return max(self.item_bytes, 4)

    @property
    def learned_bytes(self) -> int:
        """Bytes of one number of what is learned: of the model's weights, or of an adapter, which has more bits."""
        return self.item_bytes if self.adapter is None else self.full_precision_bytes

    @property
    def local(self) -> bool:
        """Whether replicas train on their own between outer steps."""
        return self.local_steps > 1

    def gradient_share(self, parameters: Sequence[Parameter], columns: int) -> float:
        """The part that travels of the bytes of these parameters' gradients, if their matrices have so many columns.

        Exact but for what is not compressed at all (norms, biases), which is little, and for "powersgd", of which
        matrices of other widths send other numbers.
        """
        exact = self.full_precision_bytes
        match self.compression:
            case "bf16":
                return ITEM_BYTES["bfloat16"] / exact
            case "int8":
                return (1 + exact / INT8_BLOCK) / exact
            case "powersgd":
                rank, sizes = self.powersgd_rank, [one.elements for one in parameters]
                sent = sum(min(size, rank * (columns + size / columns)) for size in sizes)
                return sent / sum(sizes) if sent else 1.0
        return 1.0

    @property
    def float32_weights(self) -> bool:
        """Whether an optimizer updates float32 copies in the place of 16-bit weights."""
        return self.learned_bytes < self.full_precision_bytes

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document of one microbatch."""
        return tuple(tokens for tokens, _ in self._documents)

    @cached_property
    def before(self) -> tuple[int, ...]:
        """Tokens of another document that each of them sees before its own."""
        return tuple(before for _, before in self._documents)

    @cached_property
    def _documents(self) -> tuple[tuple[int, int], ...]:
        """Both of each document. A prompt without its last token stands before the completions that see it, each of
        which begins with that token and is without its own last; all are as long as they may be."""
        asked, size = self.shared_prompts, self.microbatch_size
        count = size if asked is None else size * asked.of_row
        of_prompt = 1 if asked is None else min(count, asked.completions)
        if asked is None or of_prompt == 1:
            return tuple((tokens, 0) for tokens in (self.documents or (self.seq_len,))) * size
        counts = [of_prompt] * (count // of_prompt) + [count % of_prompt] * (count % of_prompt > 0)
        shared = asked.prompt - 1
        groups = [((shared, 0),) * (shared > 0) + ((asked.completion, shared),) * count for count in counts]
        return tuple(chain.from_iterable(groups))

    def in_ring(self, cp: int) -> TrainingFacts:
        """The same where so many ranks share a microbatch: several share no prompt."""
        return replace(self, shared_prompts=None) if cp > 1 and self.shared_prompts else self

    @property
    def predicted(self) -> int:
        """Tokens of a microbatch that the loss is computed for, where nobody shares it."""
        of_row = self.seq_len if self.target_tokens is None else self.target_tokens
        return min(sum(self.lengths), of_row * self.microbatch_size)

    @property
    def most_ranks_of_row(self) -> int:
        """Ranks that may share a row (context parallelism): each has two pieces of it, of a token at least."""
        return max(1, (sum(self.documents) or self.seq_len) // 2)

    @property
    def as_large_as_may_be(self) -> TrainingFacts:
        """The same for what there must be room for: whole rows, as some may be so, and of pairs some have hardly a
        prompt."""
        if not self.mean_lengths:
            return self
        return replace(self, shared_prompts=None, documents=(), target_tokens=None, mean_lengths=False, row_tokens=0)

    @property
    def microbatches(self) -> int:
        """Microbatches of a step over all replicas; the last may be smaller and counts as a full one."""
        return -(-self.global_batch_size // self.microbatch_size)


@dataclass(frozen=True)
class RankWork:
    """One rank that computes; parameter servers have none."""

    rank: int
    at: Coordinates
    cut: Cut
    runs: tuple[range, ...]
    """The layers of each of its chunks."""
    batch: Microbatch
    microbatches: int
    """Microbatches of its replica in one step."""
    tp: int
    replicas: int
    """Ranks over which the gradients of its ordinary parameters are all-reduced."""
    expert_replicas: int
    """Ranks over which those of its experts are, where experts are divided over replicas (`ep`)."""
    adapter: AdapterFacts | None = None
    """What is learned in the model's place."""
    projections: ProjectionFacts | None = None
    """What is learned beside it."""
    grid: GridShape | None = None
    """The grid on which it has a block of every layer."""
    known: dict[str, list[list[Parameter]]] = field(default_factory=dict, compare=False, repr=False)
    """Parameters once they were listed; ranks that hold the same share it, as there may be thousands of them."""

    @property
    def begins_model(self) -> bool:
        """Whether it has the first layer, and the embedding with it."""
        return self.runs[0].start == 0

    def ends_model(self, spec: ModelSpec) -> bool:
        """Whether it has the last layer, and what makes logits with it."""
        return self.runs[-1].stop == spec.num_layers

    def learning(self, spec: ModelSpec) -> tuple[range, ...]:
        """The layers of each chunk that run a backward pass."""
        below = forward_only_layers(spec, self)
        return tuple(range(max(run.start, below), max(run.stop, below)) for run in self.runs)

    def learned(self, spec: ModelSpec) -> list[list[Parameter]]:
        """The parameters that it learns: its own, or those of an adapter, a layer at a time; with the first of them the
        projections of hidden states."""
        units = self._trained(spec)
        if self.projections is not None and units:
            units[0] = [*self.projections.parameters(spec, self.runs), *units[0]]
        return units

    def _trained(self, spec: ModelSpec) -> list[list[Parameter]]:
        if self.adapter is None:
            return self.parameters(spec)
        if "adapter" not in self.known:
            layers = chain.from_iterable(self.runs)
            replica = self.at.replica
            units = (adapter_parameters(spec, number, self.cut, self.adapter, replica) for number in layers)
            self.known["adapter"] = [unit for unit in units if unit]
        return list(self.known["adapter"])

    def parameters(self, spec: ModelSpec) -> list[list[Parameter]]:
        """Its parameters in units that are used together, such as a layer."""
        if "all" not in self.known:
            self.known["all"] = [unit for unit in self._units(spec) if unit]
        return list(self.known["all"])

    def _units(self, spec: ModelSpec) -> Iterable[list[Parameter]]:
        if self.grid is not None:
            return grid_parameters(spec, self.runs[0], self.cut, self.grid, self.at.tp)
        return chain.from_iterable(run_parameters(spec, run, self.cut, self.at.replica) for run in self.runs)


def rank_works(
    spec: ModelSpec, plan: Plan, facts: TrainingFacts, replicas: Sequence[int] | None = None
) -> list[RankWork]:
    """Every rank of a plan that computes, in order, or those of some replicas that stand for all.

    PlanError where the plan does not fit the model.
    """
    plan.check(spec.num_layers)
    facts = facts.in_ring(plan.cp)
    cuts = [stage_cuts(spec, plan, stage) for stage in range(plan.pp)]
    shares = deal_microbatches(facts.microbatches, plan.dp)
    ranks, held = [], dict[object, dict[str, list[list[Parameter]]]]()
    some = range(plan.replicas) if replicas is None else replicas
    for rank in (replica * plan.replica_size + place for replica in some for place in range(plan.replica_size)):
        at = plan.coordinates(rank)
        tp = plan.stages[at.stage].tp
        ranks.append(
            RankWork(
                rank,
                at,
                cuts[at.stage][at.tp],
                tuple(plan.runs[chunk * plan.pp + at.stage] for chunk in range(plan.chunks)),
                _batch(plan, facts, at, tp),
                shares[at.replica],
                tp,
                plan.replicas * plan.cp,
                plan.replicas // plan.ep * plan.cp,
                facts.adapter,
                facts.projections,
                plan.grid_of(at.stage),
                held.setdefault((at.replica % plan.ep, at.stage, at.tp), {}),
            )
        )
    return ranks


def forward_only_layers(spec: ModelSpec, what: TrainingFacts | RankWork) -> int:
    """How many of the model's first layers run no backward pass: those below the lowest adapted one. What is learned of
    hidden states may be of any."""
    if what.adapter is None or what.projections is not None:
        return 0
    return lowest_adapted_layer(spec, what.adapter)


class LayerGradients(NamedTuple):
    """How far gradients go in a layer: `halves`, of its attention and its MLP, that have a backward pass; `inputs` of
    these that want a gradient; and whether the keys and queries that attention meets do (`core`)."""

    halves: int
    inputs: int
    core: bool

    def left(self, layer: LayerSpec) -> int:
        """Sums over ranks that share the layer (`LayerSpec.hidden_sums`) through which a gradient comes back."""
        return layer.hidden_sums - (2 - self.halves) if self.halves else 0


EVERY_GRADIENT, NO_GRADIENT = LayerGradients(2, 2, True), LayerGradients(0, 0, False)


def layer_gradients(spec: ModelSpec, what: TrainingFacts | RankWork, number: int) -> LayerGradients:
    """Those of the model's layer `number`. In the lowest adapted layer they end where the first adapted linear is,
    whose input wants none."""
    if what.adapter is None or what.projections is not None:
        return EVERY_GRADIENT
    lowest = lowest_adapted_layer(spec, what.adapter)
    if number != lowest:
        return EVERY_GRADIENT if number > lowest else NO_GRADIENT
    return _lowest_gradients(spec, what.adapter)


@lru_cache(64)
def _lowest_gradients(spec: ModelSpec, adapter: AdapterFacts) -> LayerGradients:
    """Of the lowest adapted layer."""
    (whole,) = cut_stage(spec, (1,))
    linears = adapted_linears(spec, lowest_adapted_layer(spec, adapter), whole, adapter)
    parts = [linear.module for linear in linears if "_attn." in linear.module]
    if not parts:
        return LayerGradients(1, 0, False)
    return LayerGradients(2, 1, any(not name.endswith(("o_proj", "out_proj")) for name in parts))


def both_passes(facts: TrainingFacts, forward: float, core: float = 0.0) -> float:
    """What a forward and a backward pass take, given a forward pass and what attention's core takes of it: the weights
    of a model beside an adapter have no gradients, and attention's core has no weights."""
    return (1 + BACKWARD) * forward if facts.adapter is None else BACKWARD * forward + core


def schedule_of(plan: Plan, microbatches: int, forward_only: int = 0) -> Schedule:
    """The pipeline schedule of a replica that has so many microbatches in a step, one or more; of the model's first
    layers so many run no backward pass."""
    return cached_schedule(schedule_key(plan, microbatches, forward_only))


class ScheduleKey(NamedTuple):
    """The arguments of `pipeline_schedule.build`."""

    name: str
    stages: int
    microbatches: int
    depth: Depth
    chunks: int
    learns_from: int


def schedule_key(plan: Plan, microbatches: int, forward_only: int = 0) -> ScheduleKey:
    """What tells the schedule of `schedule_of` from others."""
    return ScheduleKey(plan.schedule, plan.pp, microbatches, plan.depth, plan.chunks, plan.run_of(forward_only))


@lru_cache(64)
def cached_schedule(key: ScheduleKey) -> Schedule:
    """A schedule is built once; each rank asks for its stage's list of it."""
    return build(*key)


def deal_microbatches(count: int, shares: tuple[int, ...]) -> list[int]:
    """How many of `count` microbatches each replica takes, in proportion to its share, as `training.data` does."""
    whole = sum(shares)
    bounds = [count * taken // whole for taken in (0, *accumulate(shares))]
    return [stop - start for start, stop in pairwise(bounds)]


def _batch(plan: Plan, facts: TrainingFacts, at: Coordinates, tp: int) -> Microbatch:
    shape = plan.grid_of(at.stage)
    if shape is not None:
        return grid_microbatch(facts.lengths, facts.item_bytes, shape, at.tp)
    whole = sum(facts.lengths)
    tokens = sum(stop - start for start, stop in zigzag_spans(whole, plan.cp)[at.cp])
    rows = tokens * (at.tp + 1) // tp - tokens * at.tp // tp if plan.sequence else tokens
    of_row = facts.seq_len if facts.target_tokens is None else facts.target_tokens
    predicted = min(tokens, -(-of_row * facts.microbatch_size * tokens // whole))
    return Microbatch(facts.lengths, tokens, rows, predicted, facts.item_bytes, plan.cp > 1, facts.before)


def zigzag_spans(tokens: int, ranks: int) -> list[tuple[tuple[int, int], ...]]:
    """The token spans [start, stop) of a microbatch that each context-parallel rank has.

    Rank r of n has pieces r and 2 n - 1 - r of 2 n equal ones, so that all have as much attention to compute under a
    causal mask.
    """
    pieces = list(pairwise(tokens * i // (2 * ranks) for i in range(2 * ranks + 1)))
    return [tuple((a, b) for a, b in (pieces[r], pieces[-1 - r]) if a < b) for r in range(ranks)]
