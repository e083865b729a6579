"""How long a training step takes under a plan: its pipeline schedule played on clocks, and what follows it.

The model is simple. Each rank's passes take the seconds that its `ComputeTime` says. All-reduces over tp and the
all-to-all of experts are waited for; of a context-parallel ring only what takes longer than the attention that hides it
is. Gradients are all-reduced bucket by bucket as a stage's last backward pass fills them, and only what outlasts that
pass is exposed; so is a gather of new weights (ZeRO 1 and 2). With ZeRO 3 gathers are hidden by the stage's work, as
far as it lasts, and gradients are exposed as ever: they are summed once, when the last microbatch has added its part.
The update of the weights and the reading of rows take no time here (`placed_plan` adds the update).
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import LinkSpeed
from tllm.planner.cluster.execution import TLLM, Execution
from tllm.planner.cost.buckets import exposed_seconds, fill_order, padded_elements
from tllm.planner.cost.flops import BACKWARD
from tllm.planner.cost.grid_step import rounds_on_grid, waits_in_turn
from tllm.planner.cost.message_time import group_link, sending_seconds, stage_overheads
from tllm.planner.cost.messages.collective_bytes import all_gather
from tllm.planner.cost.rank_bytes import Parameter
from tllm.planner.cost.rank_work import (
    RankWork,
    ScheduleKey,
    TrainingFacts,
    cached_schedule,
    forward_only_layers,
    layer_gradients,
    rank_works,
    schedule_key,
)
from tllm.planner.cost.roofline.layer_time import ComputeTime, ConstantRate, PassSeconds
from tllm.planner.cost.traffic import Traffic, expected_dispatch_share, scattered_bytes, step_traffic
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork, StepTimeline
from tllm.planner.simulate.steady_player import SteadyPlayer, played_counts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


class SimulatedLinks(Protocol):
    """Links that differ from rank to rank."""

    def of(self, rank: int, group: str) -> LinkSpeed:
        """The slowest link over which this rank communicates with its group."""
        ...

    def hops(self, replica: int) -> Mapping[tuple[int, int], LinkSpeed]:
        """The links of a replica's pipeline, by (source stage, target stage)."""
        ...

    def one_port(self, replica: int) -> Collection[int]:
        """The stages of its pipeline that send to both neighbours through one port."""
        ...


Links = LinkSpeed | Mapping[str, LinkSpeed] | SimulatedLinks
"""One speed for what each rank sends, one for each group by its name, or each rank's own."""


@dataclass(frozen=True)
class StepPrediction:
    """One step. `seconds` is the sum of `compute`, `layers`, `pipeline` and `gradients`, and of the `roles`."""

    seconds: float
    compute: float
    """Seconds of products on the busiest stage of the slowest replica."""
    layers: float
    """Seconds that its layers wait for messages (tp, cp, ep)."""
    pipeline: float
    """Seconds that it waits for other stages."""
    gradients: float
    """Seconds of exposed all-reduces of gradients, and of gathers of weights, after the backward passes."""
    bubble: float
    """The share of all stages' time in which they neither compute nor send for a layer."""
    tokens_per_second: float
    bytes_sent: tuple[Traffic, ...]
    """By each rank that was played."""
    timeline: StepTimeline | None
    """Of the slowest replica, if it has a microbatch."""
    roles: tuple[tuple[str, float], ...] = ()
    """Seconds of roles beside the policy that learns (`simulate.role_seconds`), by name."""

    @property
    def policy(self) -> float:
        """Seconds of what is learned: all but the other roles."""
        return self.seconds - sum(seconds for _, seconds in self.roles)


@dataclass(frozen=True)
class StepSetup:
    """What all ranks of a simulated step have in common."""

    spec: ModelSpec
    plan: Plan
    facts: TrainingFacts
    links: Links
    execution: Execution = TLLM
    steady: bool = False
    """Whether of very many microbatches only the first are played, and the rest is taken to go on like them."""


def predict_step(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    speeds: float | Sequence[float | ComputeTime],
    links: Links,
    replicas: Sequence[int] | None = None,
    execution: Execution = TLLM,
) -> StepPrediction:
    """A step whose ranks reach so many flop/s: all alike, or for each rank that computes a number or a `ComputeTime`.

    `replicas`: those that stand for all, whose ranks alone are then counted and have a speed.
    """
    traffic = step_traffic(spec, plan, facts, replicas, execution)
    played = play_step(StepSetup(spec, plan, facts, links, execution), speeds, traffic, replicas)
    return prediction_of(played, facts, traffic)


def prediction_of(played: Sequence[ReplicaStep], facts: TrainingFacts, traffic: Sequence[Traffic]) -> StepPrediction:
    """The step of all replicas, which wait for the slowest."""
    slowest = max(played, key=lambda replica: replica.seconds)
    tokens = facts.global_batch_size * (facts.row_tokens or facts.seq_len)
    return StepPrediction(
        slowest.seconds,
        slowest.compute,
        slowest.layers,
        max(0.0, slowest.timeline.total - slowest.compute - slowest.layers) if slowest.timeline else 0.0,
        slowest.gradients,
        slowest.timeline.bubble if slowest.timeline else 0.0,
        tokens / slowest.seconds if slowest.seconds else math.inf,
        tuple(traffic),
        slowest.timeline,
    )


def play_step(
    setup: StepSetup,
    speeds: float | Sequence[float | ComputeTime],
    traffic: Sequence[Traffic],
    replicas: Sequence[int] | None = None,
) -> list[ReplicaStep]:
    """Each replica's step for itself, before replicas wait for one another.

    `speeds` and `replicas` are as in `predict_step`; `traffic` is of the same ranks. Raises PlanError for speeds that
    cannot be.
    """
    works = rank_works(setup.spec, setup.plan, setup.facts, replicas)
    compute_times = _compute_times(setup, works, speeds)
    of_replica = defaultdict[int, list[RankStep]](list)
    for work, sent, compute_time in zip(works, traffic, compute_times, strict=True):
        of_replica[work.at.replica].append(RankStep(setup, work, sent, compute_time))
    counts, make = {work.microbatches for work in works} - {0}, _steady_player if setup.steady else _player
    below = forward_only_layers(setup.spec, setup.facts)
    players = {count: make(setup.plan, count, below) for count in counts}
    return [ReplicaStep(setup, index, ranks, players) for index, ranks in of_replica.items()]


Player = SchedulePlayer | SteadyPlayer


def _steady_player(plan: Plan, microbatches: int, below: int) -> Player:
    """One that plays the first of very many microbatches. `below`: the first layers that run no backward pass."""
    counts = played_counts(plan.pp, microbatches)
    if counts is None:
        return _player(plan, microbatches, below)
    shorter, longer = (_player(plan, count, below) for count in counts)
    return SteadyPlayer(shorter, longer, microbatches)


def _player(plan: Plan, microbatches: int, below: int) -> SchedulePlayer:
    return _cached_player(schedule_key(plan, microbatches, below))


@lru_cache(32)
def _cached_player(key: ScheduleKey) -> SchedulePlayer:
    """A schedule is laid out once; a search plays it on the clocks of many plans."""
    return SchedulePlayer(cached_schedule(key))


def _compute_times(
    setup: StepSetup, works: Sequence[RankWork], speeds: float | Sequence[float | ComputeTime]
) -> list[ComputeTime]:
    """One for each rank. Raises PlanError unless there is one speed above 0 for each."""
    given = [speeds] * len(works) if isinstance(speeds, int | float) else speeds
    rates = [speed for speed in given if isinstance(speed, int | float)]
    if len(given) != len(works) or min(rates, default=1) <= 0:
        raise PlanError(
            f"{len(works)} ranks compute and {len(given)} speeds are given, the least {min(rates, default=0)} flop/s",
            "give flops per second above 0, one number for all ranks or one for each",
        )
    return [
        ConstantRate(setup.spec, setup.plan, setup.facts, work, speed) if isinstance(speed, int | float) else speed
        for work, speed in zip(works, given, strict=True)
    ]


def _pass_seconds(compute_time: ComputeTime, run: range, learns: range, is_frozen: bool) -> PassSeconds:
    """Those of a run of which the layers `learns` have a backward pass. Weights beside an adapter take no gradient, and
    those of the adapter are little work."""
    parts = [compute_time.pass_seconds(part) for part in (range(run.start, run.stop - len(learns)), learns) if part]
    if len(learns) < len(run):
        parts[0] = parts[0].forward_alone
    whole = PassSeconds(*map(sum, zip(*parts, strict=True)))
    return whole._replace(backward_weight=0.0) if is_frozen else whole


class RankStep:
    """What one rank takes for each microbatch on each of its chunks, in seconds."""

    def __init__(self, setup: StepSetup, work: RankWork, traffic: Traffic, compute_time: ComputeTime) -> None:
        self.setup, self.work, self.traffic = setup, work, traffic
        self.learning = work.learning(setup.spec)
        self.passes = [
            _pass_seconds(compute_time, run, learns, work.adapter is not None)
            for run, learns in zip(work.runs, self.learning, strict=True)
        ]
        if setup.facts.value_pass:
            self.passes = [seconds.with_value_pass(setup.plan.recompute) for seconds in self.passes]
        waits = self._waits() / work.microbatches if work.microbatches else 0.0
        early = 1 / self._passes_over_tp
        forward = [early * len(run) for run in work.runs]
        backward = [
            (1 - early) * len(learns) - early * self._unasked(run) / 2
            for run, learns in zip(work.runs, self.learning, strict=True)
        ]
        whole = sum(forward) + sum(backward)
        self.waits = [waits * (a + b) / whole for a, b in zip(forward, backward, strict=True)]
        """Of each chunk, seconds that one microbatch's layers wait for messages."""
        self.early = [a / (a + b) for a, b in zip(forward, backward, strict=True)]
        """The part of them that is the forward pass's: of a layer that learns two of its four all-reduces, of five or
        six where it is recomputed, of another all."""

    @property
    def works(self) -> list[StageWork]:
        """The work of each chunk, waits included."""
        return [
            StageWork(
                seconds.forward + early * waits,
                seconds.backward_input + seconds.recompute + (1 - early) * waits,
                seconds.backward_weight,
            )
            for seconds, waits, early in zip(self.passes, self.waits, self.early, strict=True)
        ]

    @property
    def compute(self) -> float:
        """Seconds of a step that it computes."""
        return self.work.microbatches * sum(seconds.whole for seconds in self.passes)

    @property
    def memory(self) -> float:
        """The part of `compute` that is elementwise and goes through memory."""
        return self.work.microbatches * sum(seconds.memory for seconds in self.passes)

    @property
    def layers(self) -> float:
        """Seconds of a step that its layers wait for messages."""
        return self.work.microbatches * sum(self.waits)

    def with_earlier_messages(self, seconds: float) -> RankStep:
        """The same rank where messages arrive so many seconds of a step earlier, because their senders are faster.

        What synchronizing and sending cost the rank itself stays.
        """
        link, all_reduces = self._link("tp"), self.work.microbatches * self._all_reduces()
        least = all_reduces * link.sync_overhead + self.traffic.tp * link.compute_overhead if self.traffic.tp else 0.0
        earlier = copy.copy(self)
        if seconds > 0 and self.layers > least:
            share = max(least, self.layers - seconds) / self.layers
            earlier.waits = [share * waits for waits in self.waits]
        return earlier

    @property
    def after_backward(self) -> float:
        """Seconds that a step still waits for when the last backward pass is done."""
        execution, zero, sums, gathers = self.setup.execution, self.setup.plan.zero, 0.0, 0.0
        for group, spread in (("dp", False), ("edp", True)):  # one bucket after another, of whichever parameters
            link, summed = self._link(group), self._summed(group, spread)
            gather = sending_seconds(getattr(self.traffic, group) - summed, link)
            sums += sending_seconds(summed, link)
            gathers += gather if zero == 3 else execution.exposed_seconds(group, gather, self.compute)
        exposed = self._exposed_all_reduces(sums)
        if zero == 3:
            exposed += max(0.0, execution.overlap_excess(gathers, self.compute))
            # Both go by one link: neither hides what the other has no time for.
            both = self._seconds("dp") + self._seconds("edp")
            exposed = max(exposed, execution.overlap_excess(both, self.compute))
        else:
            exposed += gathers
        return self._seconds("replica") + 2 * self._seconds("servers") + exposed

    def _exposed_all_reduces(self, all_reduces: float) -> float:
        """Of the seconds of all-reduces of gradients over replicas, those that outlast the last backward pass; or the
        whole next step, where they are applied one step late. Weights of local steps are sent when nothing is computed.
        """
        facts = self.setup.facts
        if facts.late:
            return max(0.0, all_reduces - self.compute - self.layers)
        if not all_reduces or facts.local or not self.setup.execution.overlap_gradients:
            return all_reduces
        sizes = [padded_elements(parameter) * facts.full_precision_bytes for parameter in self._parameters()]
        last = self.works[0]
        buckets = fill_order(sizes, facts.bucket_bytes)
        return exposed_seconds(buckets, all_reduces, last.backward_input + last.backward_weight)

    def _summed(self, group: str, spread: bool) -> float:
        """Bytes that the rank sends of the gradients that a group sums, of experts that replicas divide (`spread`) or
        of all others; the rest of what it sends there are weights that are gathered."""
        sent: int = getattr(self.traffic, group)
        facts, zero = self.setup.facts, self.setup.plan.zero
        if not zero:
            return sent
        ranks = self.work.expert_replicas if spread else self.work.replicas
        parameters = [one for one in self._parameters() if one.spread == spread]
        elements = sum(map(padded_elements, parameters))
        if zero < 3:
            return sent - all_gather(elements // ranks * facts.learned_bytes, ranks)
        if group in dict(self.setup.execution.overlap):
            return 0.0  # what others' trainers send beside products travels with the gathers
        share = facts.gradient_share(parameters, self.setup.spec.hidden_size)
        return min(scattered_bytes(elements, ranks, facts, share), sent)

    def _parameters(self) -> list[Parameter]:
        return [parameter for unit in self.work.learned(self.setup.spec) for parameter in unit]

    def _waits(self) -> float:
        """Seconds of a step that layers wait for messages."""
        setup, again = self.setup, 1 + self._recomputes_layers
        layers, learning = sum(map(len, self.work.runs)), sum(map(len, self.learning))
        experts, trained = (
            sum(setup.spec.layers[number].moe is not None for run in runs for number in run)
            for runs in (self.work.runs, self.learning)
        )
        in_turn = 1 if setup.plan.grid is None else waits_in_turn(setup.plan.grid)
        tp = self._seconds("tp", self._all_reduces(), in_turn)
        share = expected_dispatch_share(setup.spec, setup.plan, self.work) if setup.plan.ep > 1 else 1.0
        ep = self._seconds("ep", 3 * experts + (3 * again - 1) * trained, share)
        cp = self._seconds("cp", (setup.plan.cp - 1) * (layers + (2 + self._attends_again) * learning))
        in_groups = (("tp", tp), ("ep", ep))
        exposed = [setup.execution.exposed_seconds(group, seconds, self.compute) for group, seconds in in_groups]
        return sum(exposed) + max(0.0, cp - self._attention())

    @property
    def _recomputes_layers(self) -> bool:
        return self.setup.plan.recompute == "layer"

    @property
    def _passes_over_tp(self) -> float:
        """How often each layer all-reduces its rows over tp: forward, backward, and again where it is recomputed, which
        may lack the last of its two sums (with sequence parallelism a scatter, which is half of one)."""
        plan = self.setup.plan
        if not self._recomputes_layers:
            return 2
        if not self.setup.execution.stops_before_last_sum(self.setup.spec, plan):
            return 3
        return 2.75 if plan.sequence else 2.5

    @property
    def _attends_again(self) -> bool:
        """Whether attention's core is computed once more for the backward pass, and its ring goes round again."""
        return self.setup.plan.recompute != "none"

    def _all_reduces(self) -> int:
        """Messages of a microbatch over tp that are waited for. A long all-reduce is two of them, one after the other
        (reduce-scatter and all-gather). Norms over all heads' queries and keys have a short one each; rows of experts
        beside an MLP go in one message with the MLP's."""
        shape = self.setup.plan.grid
        if shape is not None:
            return rounds_on_grid(self.setup.spec, shape, len(self.setup.spec.layers), self._recomputes_layers)
        phases = 2 if self.setup.plan.sequence or self.work.tp > 2 else 1
        layers, learning = sum(map(len, self.work.runs)), sum(map(len, self.learning))
        rows = 2 * layers + 2 * (self._passes_over_tp - 1) * learning - sum(map(self._unasked, self.work.runs))
        norms = 2 * (layers + (1 + self._recomputes_layers) * learning) if self.setup.spec.qk_norm == "full" else 0
        return round(rows * phases) + norms

    def _unasked(self, run: range) -> float:
        """Sums over tp that the backward pass of a run's layers does without: of inputs that want no gradient, in the
        lowest adapted layer. With sequence parallelism what enters and what leaves is half of one each."""
        found = [layer_gradients(self.setup.spec, self.work, number) for number in run]
        inputs = sum(2 - gradients.inputs for gradients in found if gradients.halves)
        halves = sum(2 - gradients.halves for gradients in found if gradients.halves)
        return (inputs + halves) / 2 if self.setup.plan.sequence else inputs

    def _attention(self) -> float:
        """Seconds of a step's attention, which hides a ring's messages."""
        learns = [len(run) / len(whole) for run, whole in zip(self.learning, self.work.runs, strict=True)]
        passes, backward = zip(self.passes, learns, strict=True), BACKWARD + self._attends_again
        return self.work.microbatches * sum((1 + backward * share) * seconds.attention for seconds, share in passes)

    def _seconds(self, group: str, messages: int = 0, share: float = 1.0) -> float:
        """Seconds of a `share` of a step's bytes in a group, in so many messages of each microbatch, one by one."""
        sent = share * getattr(self.traffic, group)
        return sending_seconds(sent, self._link(group), self.work.microbatches * messages)

    def _link(self, group: str) -> LinkSpeed:
        links = self.setup.links
        return group_link(links, group) if isinstance(links, LinkSpeed | Mapping) else links.of(self.work.rank, group)


class ReplicaStep:
    """One replica's pipeline in a step: each stage is as slow as the slowest of its ranks, which `stages` holds."""

    def __init__(self, setup: StepSetup, index: int, ranks: Sequence[RankStep], players: Mapping[int, Player]) -> None:
        self.index, pp = index, setup.plan.pp
        self.stages = [_slowest([rank for rank in ranks if rank.work.at.stage == stage]) for stage in range(pp)]
        self.timeline: StepTimeline | None = None
        work = ranks[0].work
        if work.microbatches:
            hop_bytes = work.batch.rows * setup.spec.hidden_size * work.batch.item_bytes
            hops, one_port = _hops(setup.links, index, pp)
            overheads = stage_overheads(_blocking(hops) if setup.execution.waits_for_hops else hops, setup.plan)
            works = [
                _with_overhead(stage.works, overhead * hop_bytes)
                for stage, overhead in zip(self.stages, overheads, strict=True)
            ]
            self.timeline = players[work.microbatches].play(works, hops, hop_bytes, one_port)
        busiest = max(self.stages, key=lambda stage: stage.compute + stage.layers)
        self.compute, self.layers = busiest.compute, busiest.layers
        self.gradients = max(rank.after_backward for rank in ranks)
        self.seconds = (self.timeline.total if self.timeline else 0.0) + self.gradients


def _slowest(ranks: Sequence[RankStep]) -> RankStep:
    """The rank that a stage is as slow as. A faster rank's messages travel while it works, so that it waits less
    (`message_time.compute_and_all_reduce_time`)."""
    slowest, *others = sorted(ranks, key=lambda rank: rank.compute + rank.layers, reverse=True)
    if not others:
        return slowest
    return slowest.with_earlier_messages((slowest.compute - max(rank.compute for rank in others)) / 2)


Hops = LinkSpeed | Mapping[tuple[int, int], LinkSpeed]
"""One speed for all links between stages, or each link's own."""


def _hops(links: Links, replica: int, stages: int) -> tuple[Hops, Collection[int]]:
    """The links between stages, and the stages that send everything through one port: a single speed for all links is
    that of a port."""
    if isinstance(links, LinkSpeed | Mapping):
        return group_link(links, "pp"), range(stages)
    return links.hops(replica), links.one_port(replica)


def _blocking(hops: Hops) -> Hops:
    """The links where a stage is kept from computing for as long as a message takes."""
    if isinstance(hops, LinkSpeed):
        return replace(hops, compute_overhead=hops.compute_overhead + 1 / hops.bandwidth)
    return {pair: replace(hop, compute_overhead=hop.compute_overhead + 1 / hop.bandwidth) for pair, hop in hops.items()}


def _with_overhead(works: list[StageWork], seconds: float) -> list[StageWork]:
    """The work of a stage's chunks, each op of which also receives rows from one stage and sends them to another."""
    if not seconds:
        return works
    return [StageWork(work.forward + seconds, work.backward_input + seconds, work.backward_weight) for work in works]
