"""How long a training step takes under a plan: its own schedule played on clocks, and what comes before and after.

The model is simple. Products run at the speed given. Sums over tp and the all-to-all of experts wait for their bytes;
of a ring's bytes only what outlasts the work of its attention is waited for. Gradients are summed bucket by bucket as a
stage's last backward pass fills them, and what outlasts this comes on top; so does a gather of new weights. With
zero 3 gathers are hidden by the stage's work, as far as that goes. The update and the reading of rows take no time.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import TLLM, Execution, LinkSpeed
from tllm.planner.cost.buckets import exposed_seconds, fill_order, padded_elements
from tllm.planner.cost.collective_bytes import all_gather
from tllm.planner.cost.flops import BACKWARD
from tllm.planner.cost.layer_time import ComputeTime, ConstantRate
from tllm.planner.cost.message_time import group_link, sending_seconds, stage_overheads
from tllm.planner.cost.rank_work import RankWork, TrainingFacts, rank_works, schedule_of
from tllm.planner.cost.traffic import Traffic, expected_dispatch_share, step_traffic
from tllm.planner.simulate.pipeline import SchedulePlayer, StageWork, StepTimeline
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan


class RankLinks(Protocol):
    """Links that are unequal."""

    def of(self, rank: int, group: str) -> LinkSpeed:
        """The slowest over which this rank works with its group."""
        ...

    def hops(self, replica: int) -> Mapping[tuple[int, int], LinkSpeed]:
        """Those of a replica's pipeline, by (stage, stage)."""
        ...

    def one_port(self, replica: int) -> Collection[int]:
        """The stages of its pipeline that send to both neighbours by one port."""
        ...


Links = LinkSpeed | Mapping[str, LinkSpeed] | RankLinks
"""One speed for what each rank sends, one for each group by its name, or each rank's own."""


@dataclass(frozen=True)
class StepPrediction:
    """One step. `seconds` is the sum of the others, each of the slowest replica or the rank that is waited for.

    `compute`: products, on the stage that has most; `layers`: what its layers wait for (tp, cp, ep); `pipeline`: what
    that stage waits for others; `gradients`: what is left of sums when backward passes are done, and gathers.
    `bubble`: the share of all stages' time in which they neither compute nor send for a layer. `timeline`: of the
    slowest replica, if it has a microbatch.
    """

    seconds: float
    compute: float
    layers: float
    pipeline: float
    gradients: float
    bubble: float
    tokens_per_second: float
    bytes_sent: tuple[Traffic, ...]
    timeline: StepTimeline | None


def predict_step(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    speeds: float | Sequence[float | ComputeTime],
    links: Links,
    replicas: Sequence[int] | None = None,
    execution: Execution = TLLM,
) -> StepPrediction:
    """A step whose ranks reach so many flops (all alike, or for each rank that computes a number or a `ComputeTime`).

    `replicas`: those that stand for all, whose ranks alone are then counted and have a speed.
    """
    traffic = step_traffic(spec, plan, facts, replicas)
    return prediction_of(play_step(spec, plan, facts, speeds, links, traffic, replicas, execution), facts, traffic)


def prediction_of(played: Sequence[ReplicaStep], facts: TrainingFacts, traffic: Sequence[Traffic]) -> StepPrediction:
    """All wait for the slowest replica."""
    slowest = max(played, key=lambda one: one.seconds)
    tokens = facts.global_batch_size * facts.seq_len
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
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    speeds: float | Sequence[float | ComputeTime],
    links: Links,
    traffic: Sequence[Traffic],
    replicas: Sequence[int] | None = None,
    execution: Execution = TLLM,
) -> list[ReplicaStep]:
    """Each replica's step for itself. `traffic`: of the same ranks. PlanError for speeds that cannot be."""
    works = rank_works(spec, plan, facts, replicas)
    given = [speeds] * len(works) if isinstance(speeds, int | float) else speeds
    numbers = [one for one in given if isinstance(one, int | float)]
    if len(given) != len(works) or min(numbers, default=1) <= 0:
        raise PlanError(
            f"{len(works)} ranks compute and {len(given)} speeds are given, the least {min(numbers, default=0)} flop/s",
            "give flops per second above 0, one number for all ranks or one for each",
        )
    ranks = []
    for work, sent, one in zip(works, traffic, given, strict=True):
        speed = ConstantRate(spec, plan, facts, work, one) if isinstance(one, int | float) else one
        ranks.append(RankStep(spec, plan, facts, work, sent, speed, links, execution))
    counts = {work.microbatches for work in works} - {0}
    players = {count: SchedulePlayer(schedule_of(plan, count)) for count in counts}
    of_replica = defaultdict[int, list[RankStep]](list)
    for rank in ranks:
        of_replica[rank.work.at.replica].append(rank)
    return [ReplicaStep(plan, index, some, links, players) for index, some in of_replica.items()]


class RankStep:
    """What one rank takes for each microbatch on each of its chunks, in seconds."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        facts: TrainingFacts,
        work: RankWork,
        traffic: Traffic,
        speed: ComputeTime,
        links: Links,
        execution: Execution,
    ) -> None:
        self.spec, self.plan, self.facts, self.work, self.traffic = spec, plan, facts, work, traffic
        self.links, self.execution = links, execution
        self.passes = [speed.pass_seconds(run) for run in work.runs]
        waits = self._waits() / work.microbatches if work.microbatches else 0.0
        layers = sum(map(len, work.runs))
        self.waits = [waits * len(run) / layers for run in work.runs]
        self.behind = 0.0  # seconds of a step by which the next rank of its team has done its work before

    @property
    def works(self) -> list[StageWork]:
        """Of each chunk. Of what it waits for, a forward pass has two of four sums, of six where layers run again."""
        early = 2 / (6 if self.plan.recompute == "layer" else 4)
        return [
            StageWork(
                one.forward + early * waits,
                one.backward_input + one.recompute + (1 - early) * waits,
                one.backward_weight,
            )
            for one, waits in zip(self.passes, self.waits, strict=True)
        ]

    @property
    def compute(self) -> float:
        """Of a step."""
        return self.work.microbatches * sum(one.whole for one in self.passes)

    @property
    def memory(self) -> float:
        """The part of it that goes through memory, elementwise."""
        return self.work.microbatches * sum(one.memory for one in self.passes)

    @property
    def layers(self) -> float:
        """What its layers wait for in a step."""
        return self.work.microbatches * sum(self.waits)

    def ahead(self, seconds: float) -> RankStep:
        """The same where messages come so much sooner in a step, but for what ranks lose that meet, and that send."""
        link, meets = self._link("tp"), self.work.microbatches * self._sums()
        least = meets * link.sync_overhead + self.traffic.tp * link.compute_overhead if self.traffic.tp else 0.0
        found = copy.copy(self)
        if seconds > 0 and self.layers > least:
            less = max(least, self.layers - seconds) / self.layers
            found.waits = [less * waits for waits in self.waits]
        return found

    @property
    def after(self) -> float:
        """What a step still waits for when the last backward pass is done."""
        rest = self._seconds("edp") + self._seconds("replica") + 2 * self._seconds("servers")
        if self.plan.zero == 3:
            return rest + max(0.0, self.execution.overlap_excess(self._seconds("dp"), self.compute))
        gather = self._new_weights() if self.plan.zero else 0
        link = self._link("dp")
        late = self._late(sending_seconds(self.traffic.dp - gather, link))
        return rest + late + self.execution.exposed_seconds("dp", sending_seconds(gather, link), self.compute)

    def _late(self, sums: float) -> float:
        """Of sums of gradients over dp what outlasts the last backward pass."""
        if not sums:
            return 0.0
        sizes = [
            padded_elements(one) * self.facts.master_bytes for unit in self.work.parameters(self.spec) for one in unit
        ]
        last = self.works[0]
        return exposed_seconds(
            fill_order(sizes, self.facts.bucket_bytes), sums, last.backward_input + last.backward_weight
        )

    def _new_weights(self) -> int:
        """Bytes of the ranges of weights that are sent after an update."""
        whole = sum(padded_elements(one) for unit in self.work.parameters(self.spec) for one in unit if not one.spread)
        return all_gather(whole // self.work.replicas * self.facts.item_bytes, self.work.replicas)

    def _waits(self) -> float:
        """Of a step: what layers wait for."""
        layers, passes = sum(map(len, self.work.runs)), self._times
        tp = self._seconds("tp", self._sums())
        meets = expected_dispatch_share(self.spec, self.plan, self.work) if self.plan.ep > 1 else 1.0
        ep = self._seconds("ep", (3 * passes - 1) * layers, meets)
        cp = self._seconds("cp", (self.plan.cp - 1) * (passes + 1) * layers)
        alone = [self.execution.exposed_seconds(group, each, self.compute) for group, each in (("tp", tp), ("ep", ep))]
        return sum(alone) + max(0.0, cp - self._of_attention())

    @property
    def _times(self) -> int:
        """How often each layer sums its rows over tp: forward, again where that is run again, and backward."""
        return 3 if self.plan.recompute == "layer" else 2

    def _sums(self) -> int:
        """Messages of a microbatch over tp. Each sum over long ways is two of them, one after the other."""
        hops = 2 if self.plan.sequence or self.work.tp > 2 else 1
        return 2 * self._times * sum(map(len, self.work.runs)) * hops

    def _of_attention(self) -> float:
        """Of a step: the work that hides a ring's messages."""
        return self.work.microbatches * (1 + BACKWARD) * sum(one.attention for one in self.passes)

    def _seconds(self, group: str, messages: int = 0, part: float = 1.0) -> float:
        """Of a part of a step's bytes, and of so many messages for each microbatch that are waited for one by one."""
        sent = part * getattr(self.traffic, group)
        return sending_seconds(sent, self._link(group), self.work.microbatches * messages)

    def _link(self, group: str) -> LinkSpeed:
        if isinstance(self.links, LinkSpeed | Mapping):
            return group_link(self.links, group)
        return self.links.of(self.work.rank, group)


class ReplicaStep:
    """One replica's pipeline: each stage is as slow as the slowest of its ranks, which `stages` holds."""

    def __init__(
        self, plan: Plan, index: int, ranks: Sequence[RankStep], links: Links, players: Mapping[int, SchedulePlayer]
    ) -> None:
        self.index = index
        at_stage = [[one for one in ranks if one.work.at.stage == stage] for stage in range(plan.pp)]
        self.stages = [_slowest(stage) for stage in at_stage]
        self.timeline: StepTimeline | None = None
        count = ranks[0].work.microbatches
        if count:
            batch = ranks[0].work.batch
            hop = batch.rows * ranks[0].spec.hidden_size * batch.item_bytes
            hops, one_port = _hops(links, ranks[0], plan.pp)
            works = [
                _with_effort(one.works, effort * hop)
                for one, effort in zip(self.stages, stage_overheads(hops, plan), strict=True)
            ]
            self.timeline = players[count].play(works, hops, hop, one_port)
        busiest = max(self.stages, key=lambda one: one.compute + one.layers)
        self.compute, self.layers = busiest.compute, busiest.layers
        self.gradients = max(one.after for one in ranks)
        self.seconds = (self.timeline.total if self.timeline else 0.0) + self.gradients


def _slowest(ranks: Sequence[RankStep]) -> RankStep:
    """Who a stage is as slow as. The messages of a faster rank are under way while it works (`sums.in_turn`)."""
    slowest, *others = sorted(ranks, key=lambda one: one.compute + one.layers, reverse=True)
    return slowest.ahead((slowest.compute - max(one.compute for one in others)) / 2) if others else slowest


def _hops(
    links: Links, rank: RankStep, stages: int
) -> tuple[LinkSpeed | Mapping[tuple[int, int], LinkSpeed], Collection[int]]:
    """Links between stages, and the stages whose all share a port: one speed is of what a rank sends to anybody."""
    if isinstance(links, LinkSpeed | Mapping):
        return group_link(links, "pp"), range(stages)
    return links.hops(rank.work.at.replica), links.one_port(rank.work.at.replica)


def _with_effort(works: list[StageWork], seconds: float) -> list[StageWork]:
    """An op of one chunk takes its rows from one stage and gives them to another, and so does its way back."""
    if not seconds:
        return works
    return [StageWork(one.forward + seconds, one.backward_input + seconds, one.backward_weight) for one in works]
