"""How long a training step takes under a plan: its own schedule played on clocks, and what comes before and after.

The model is simple. Products run at the speed given. Sums over tp and the all-to-all of experts wait for their bytes;
of a ring's bytes only what outlasts the work of its attention is waited for. The sum of gradients begins with a stage's
last backward pass, as in `train.gradients`, and what outlasts this comes on top; so does a gather of new weights. With
zero 3 gathers are hidden by the stage's work, as far as that goes. The update and the reading of rows take no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tllm.ground.errors import PlanError
from tllm.planner.flops import BACKWARD, attention_flops, layer_flops, logits_flops
from tllm.planner.messages import all_gather
from tllm.planner.ranks import RankWork, TrainingFacts, schedule_of, work_of
from tllm.planner.simulate import LinkSpeed, Timeline, Work, simulate
from tllm.planner.traffic import Traffic, step_traffic
from tllm.planner.training import padded
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Plan


class RankLinks(Protocol):
    """Links that are unequal."""

    def of(self, rank: int, group: str) -> LinkSpeed:
        """The slowest over which this rank works with its group."""
        ...

    def hops(self, replica: int) -> Mapping[tuple[int, int], LinkSpeed]:
        """Those of a replica's pipeline, by (stage, stage)."""
        ...


Links = LinkSpeed | Mapping[str, LinkSpeed] | RankLinks
"""One speed for what each rank sends, one for each group by its name, or each rank's own."""


@dataclass(frozen=True)
class Prediction:
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
    timeline: Timeline | None


def predict_step(
    spec: ModelSpec,
    plan: Plan,
    facts: TrainingFacts,
    flops_per_second: float | Sequence[float],
    links: Links,
    replicas: Sequence[int] | None = None,
) -> Prediction:
    """A step whose ranks reach so many flops (all alike, or one number for each rank that computes).

    `replicas`: those that stand for all, whose ranks alone are then counted and have a number.
    """
    works, traffic = work_of(spec, plan, facts, replicas), step_traffic(spec, plan, facts, replicas)
    speeds = [flops_per_second] * len(works) if isinstance(flops_per_second, int | float) else flops_per_second
    if len(speeds) != len(works) or min(speeds) <= 0:
        raise PlanError(
            f"{len(works)} ranks compute and {len(speeds)} speeds are given, the least {min(speeds, default=0)} flop/s",
            "give flops per second above 0, one number for all ranks or one for each",
        )
    ranks = [_Rank(spec, plan, facts, *each, links) for each in zip(works, traffic, speeds, strict=True)]
    played = [
        _Replica(plan, facts, [one for one in ranks if one.work.at.replica == index], links)
        for index in dict.fromkeys(work.at.replica for work in works)
    ]
    slowest = max(played, key=lambda one: one.seconds)
    tokens = facts.global_batch_size * facts.seq_len
    return Prediction(
        slowest.seconds,
        slowest.compute,
        slowest.layers,
        slowest.timeline.total - slowest.compute - slowest.layers if slowest.timeline else 0.0,
        slowest.gradients,
        slowest.timeline.bubble if slowest.timeline else 0.0,
        tokens / slowest.seconds if slowest.seconds else math.inf,
        tuple(traffic),
        slowest.timeline,
    )


class _Rank:
    """What one rank takes for each microbatch on each of its chunks, in seconds."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        facts: TrainingFacts,
        work: RankWork,
        traffic: Traffic,
        flops_per_second: float,
        links: Links,
    ) -> None:
        self.spec, self.plan, self.facts, self.work, self.traffic = spec, plan, facts, work, traffic
        self.speed, self.links = flops_per_second, links
        self.forward = [self._flops(run) / flops_per_second for run in work.runs]
        self.again = [self._again(run) / flops_per_second for run in work.runs]
        waits = self._waits() / work.microbatches if work.microbatches else 0.0
        layers = sum(map(len, work.runs))
        self.waits = [waits * len(run) / layers for run in work.runs]

    @property
    def works(self) -> list[Work]:
        """Of each chunk. Of what it waits for, a forward pass has two of four sums, of six where layers run again."""
        early = 2 / (6 if self.plan.recompute == "layer" else 4)
        return [
            Work(forward + early * waits, (BACKWARD - 1) * forward + again + (1 - early) * waits, forward)
            for forward, again, waits in zip(self.forward, self.again, self.waits, strict=True)
        ]

    @property
    def compute(self) -> float:
        """Of a step."""
        passes = (1 + BACKWARD) * sum(self.forward) + sum(self.again)
        return self.work.microbatches * passes

    @property
    def after(self) -> float:
        """What a step still waits for when the last backward pass is done."""
        rest = self._seconds("edp") + self._seconds("replica") + 2 * self._seconds("servers")
        if self.plan.zero == 3:
            return rest + max(0.0, self._seconds("dp") - self.compute)
        gather = self._new_weights() if self.plan.zero else 0
        link, last = self._link("dp"), self.works[0]
        sums = seconds_of(self.traffic.dp - gather, link) - (last.backward_input + last.backward_weight)
        return rest + max(0.0, sums) + seconds_of(gather, link)

    def _new_weights(self) -> int:
        """Bytes of the ranges of weights that are sent after an update."""
        whole = sum(padded(one) for unit in self.work.parameters(self.spec) for one in unit if not one.spread)
        return all_gather(whole // self.work.replicas * self.facts.item, self.work.replicas)

    def _waits(self) -> float:
        """Of a step: what layers wait for. Each sum over long ways is two messages, one after the other."""
        layers, hops = sum(map(len, self.work.runs)), 2 if self.plan.sequence or self.work.tp > 2 else 1
        passes = 3 if self.plan.recompute == "layer" else 2
        tp = self._seconds("tp", 2 * passes * layers * hops)
        ep = self._seconds("ep", (3 * passes - 1) * layers)
        return (
            tp + ep + max(0.0, self._seconds("cp", (self.plan.cp - 1) * (passes + 1) * layers) - self._of_attention())
        )

    def _of_attention(self) -> float:
        """Of a step: the work that hides a ring's messages."""
        numbers = [number for run in self.work.runs for number in run]
        lengths, cut = self.facts.lengths, self.work.cut
        forward = sum(attention_flops(self.spec, self.spec.layers[n], cut, lengths) for n in numbers) / self.plan.cp
        return self.work.microbatches * (1 + BACKWARD) * forward / self.speed

    def _flops(self, run: range) -> float:
        cut, batch = self.work.cut, self.work.batch
        layers = sum(layer_flops(self.spec, self.spec.layers[n], cut, self.facts.lengths) for n in run)
        here = layers * batch.tokens / sum(self.facts.lengths)
        return here + (logits_flops(self.spec, cut, batch.predicted) if run.stop == self.spec.num_layers else 0)

    def _again(self, run: range) -> float:
        """What is worked out a second time, the layers' last product too: it is a small part of them."""
        if self.plan.recompute == "none":
            return 0.0
        count = layer_flops if self.plan.recompute == "layer" else attention_flops
        whole = sum(count(self.spec, self.spec.layers[n], self.work.cut, self.facts.lengths) for n in run)
        return whole * self.work.batch.tokens / sum(self.facts.lengths)

    def _seconds(self, group: str, messages: int = 0) -> float:
        """Of a step's bytes, and of so many messages for each microbatch that are waited for one after another."""
        return seconds_of(getattr(self.traffic, group), self._link(group), self.work.microbatches * messages)

    def _link(self, group: str) -> LinkSpeed:
        if isinstance(self.links, LinkSpeed | Mapping):
            return speed_of(self.links, group)
        return self.links.of(self.work.rank, group)


class _Replica:
    """One replica's pipeline: each stage is as slow as the slowest of its ranks."""

    def __init__(self, plan: Plan, facts: TrainingFacts, ranks: Sequence[_Rank], links: Links) -> None:
        stages = [[one for one in ranks if one.work.at.stage == stage] for stage in range(plan.pp)]
        slowest = [max(stage, key=lambda one: one.compute + sum(one.waits)) for stage in stages]
        self.timeline: Timeline | None = None
        count = ranks[0].work.microbatches
        if count:
            batch = ranks[0].work.batch
            hop = batch.rows * ranks[0].spec.hidden_size * batch.item
            schedule = schedule_of(plan, count)
            self.timeline = simulate(schedule, [one.works for one in slowest], _hops(links, ranks[0]), hop)
        busiest = max(slowest, key=lambda one: one.compute + count * sum(one.waits))
        self.compute, self.layers = busiest.compute, count * sum(busiest.waits)
        self.gradients = max(one.after for one in ranks)
        self.seconds = (self.timeline.total if self.timeline else 0.0) + self.gradients


def _hops(links: Links, rank: _Rank) -> LinkSpeed | Mapping[tuple[int, int], LinkSpeed]:
    if isinstance(links, LinkSpeed | Mapping):
        return speed_of(links, "pp")
    return links.hops(rank.work.at.replica)


def speed_of(links: LinkSpeed | Mapping[str, LinkSpeed], group: str) -> LinkSpeed:
    """PlanError where the group's speed is not given."""
    if isinstance(links, LinkSpeed):
        return links
    if group not in links:
        raise PlanError(f"no speed is given for the links of {group}", f"given: {', '.join(sorted(links))}")
    return links[group]


def seconds_of(sent: int, speed: LinkSpeed, messages: int = 1) -> float:
    """Nothing, or the bytes one after another and as many ways to the other end as there are messages."""
    return sent / speed.bandwidth + max(1, messages) * speed.latency if sent else 0.0
