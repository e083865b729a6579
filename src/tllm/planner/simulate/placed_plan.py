"""A training plan on the devices of a cluster: each rank's speed, the links of its groups, and a step's seconds."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from tllm.core.errors import PlanError
from tllm.planner.cluster.device import Cluster, Device, LinkSpeed, worst
from tllm.planner.cluster.execution import TLLM, Execution
from tllm.planner.cost.buckets import padded_elements, range_elements
from tllm.planner.cost.flops import attention_flops, layer_flops, training_flops
from tllm.planner.cost.link_levels import exchange_link, gather_link
from tllm.planner.cost.message_time import sending_seconds
from tllm.planner.cost.rank_work import (
    RankWork,
    TrainingFacts,
    deal_microbatches,
    forward_only_layers,
    rank_works,
)
from tllm.planner.cost.roofline.layer_time import ComputeTime, ConstantRate, LayerTimeModel
from tllm.planner.cost.roofline.update_time import update_seconds
from tllm.planner.cost.traffic import Traffic, step_traffic
from tllm.planner.memory.snapshots import RankSnapshots, rank_snapshots
from tllm.planner.memory.training_memory import RankMemory, training_bytes
from tllm.planner.simulate.role_seconds import Learning, role_seconds
from tllm.planner.simulate.training_step import ReplicaStep, StepPrediction, StepSetup, play_step, prediction_of
from tllm.spec.cut import cut_stage, size, stage_cuts
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Coordinates, Plan
from tllm.spec.process_groups import SERVERS, neighbours, server_ranks, snapshot_holders, targets
from tllm.spec.process_groups import group as group_of


@dataclass(frozen=True)
class PlacedPlan:
    """A plan whose rank r runs on `devices[r]`."""

    spec: ModelSpec
    plan: Plan
    facts: TrainingFacts
    cluster: Cluster
    devices: tuple[int, ...]
    product_dtype: str | None = None
    """The dtype in which linear layers are multiplied, where it is not that of the job."""
    execution: Execution | None = None
    """How a step is carried out. With it ranks are timed by the roofline model (`LayerTimeModel`), so that elementwise
    operations count too; without it by tllm's measured rate of products."""
    steady: bool = False
    """Whether of very many microbatches only the first are played (`steady_player`)."""

    def __post_init__(self) -> None:
        if len(self.devices) != self.plan.world_size:
            raise PlanError(f"the plan has {self.plan.world_size} ranks and {len(self.devices)} devices are given")

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        """The machine of each rank."""
        return self.cluster.machines(self.devices)

    @cached_property
    def _snapshots(self) -> tuple[RankSnapshots, ...]:
        return rank_snapshots(self.spec, self.plan, self.facts, self.hosts)

    @cached_property
    def _holders(self) -> tuple[int, ...]:
        """For each rank the one that keeps its snapshots."""
        return snapshot_holders(self.hosts)

    @cached_property
    def _sources(self) -> dict[int, list[int]]:
        """For each rank those whose snapshots it keeps."""
        sources = defaultdict[int, list[int]](list)
        for rank, holder in enumerate(self._holders):
            sources[holder].append(rank)
        return sources

    @cached_property
    def stands_for(self) -> list[int]:
        """For each replica the first one with the same work on devices that are equally fast and equally far apart,
        and with snapshots of as many bytes."""
        ranks, ep = self.plan.replica_size, self.plan.ep
        seen, representatives = dict[object, int](), list[int]()
        cuts = [cut for stage in range(self.plan.pp) for cut in stage_cuts(self.spec, self.plan, stage)]
        for replica, count in enumerate(deal_microbatches(self.facts.microbatches, self.plan.dp)):
            first, own = replica // ep * ep * ranks, replica * ranks
            places = [(own, ranks), (first, ep * ranks)][: 1 if ep == 1 else 2]
            pattern = tuple(self.cluster.pattern(self.devices[start : start + many]) for start, many in places)
            held = tuple(size(cut.holders[replica % ep]) for cut in cuts)
            key = count, held, pattern, self._snapshots[own : own + ranks]
            representatives.append(seen.setdefault(key, replica))
        return representatives

    @property
    def replicas(self) -> list[int]:
        """The replicas that stand for all."""
        return list(dict.fromkeys(self.stands_for))

    def predict(self) -> StepPrediction:
        """A step and the update after it, for which states that lie on disk are read and written."""
        return self.play()[0]

    def play(self) -> tuple[StepPrediction, list[ReplicaStep]]:
        """The same, and the steps of the replicas that stand for all, without what follows their all-reduces."""
        replicas = self.replicas
        works = rank_works(self.spec, self.plan, self.facts, replicas)
        execution, links = self.execution or TLLM, PlacedLinks(self)
        traffic = step_traffic(self.spec, self.plan, self.facts, replicas, execution)
        setup = StepSetup(self.spec, self.plan, self.facts, links, execution, self.steady)
        played = play_step(setup, self._speeds(works), traffic, replicas)
        step = prediction_of(played, self.facts, traffic)
        of_replica = {replica.index: replica for replica in played}
        ends = []
        for work, sent in zip(works, traffic, strict=True):
            replica = of_replica[work.at.replica]
            after = self._not_hidden(work, sent, replica, links) + self._replication(work, step)
            ends.append(replica.seconds + self._update(work) + after)
        if self.plan.offload == "disk":
            ends.append(max(ends) + max(map(self._disk, self.memory(replicas))))
        return self._with_roles(_ending_at(step, max(ends))), played

    def _with_roles(self, step: StepPrediction) -> StepPrediction:
        """The step with what roles beside the policy take of it."""
        learning = Learning(step.seconds, step.compute + step.layers + step.pipeline)
        roles = role_seconds(self.spec, self.plan, self.facts, self.cluster, self.devices, learning)
        seconds = step.seconds + sum(roles.values())
        rate = step.tokens_per_second * (step.seconds / seconds if roles else 1.0)
        return replace(step, seconds=seconds, tokens_per_second=rate, roles=tuple(roles.items()))

    def bytes_of_all(self, step: StepPrediction) -> int:
        """Bytes that all ranks send in a predicted step, which has those of the replicas that stand for all."""
        size, counts = self.plan.replica_size, Counter(self.stands_for)
        parts = zip(self.replicas, range(0, len(step.bytes_sent), size), strict=True)
        return sum(counts[replica] * sent.total for replica, at in parts for sent in step.bytes_sent[at : at + size])

    def memory(self, replicas: Sequence[int] | None = None) -> list[RankMemory]:
        """The memory of the ranks of some replicas, or of all."""
        return training_bytes(self.spec, self.plan, self.facts, replicas, self.hosts)

    def fits(self, memory: Sequence[RankMemory]) -> bool:
        """Whether each of these ranks has room on its device."""
        return all(rank.total <= self._device(rank.rank).memory for rank in memory)

    def _speeds(self, works: Sequence[RankWork]) -> Sequence[ComputeTime]:
        """The speed of each rank; ranks with the same work on equal devices share one model."""
        if self.execution is None:
            return [self._rate(work) for work in works]
        models = dict[object, LayerTimeModel]()
        for work in works:
            device = self._device(work.rank)
            key = (work.runs, work.cut, work.batch, device)
            if key not in models:
                models[key] = LayerTimeModel(
                    self.spec, self.plan, self.facts, work, device, self.execution, self.product_dtype
                )
        return [models[work.runs, work.cut, work.batch, self._device(work.rank)] for work in works]

    def _rate(self, work: RankWork) -> ConstantRate:
        """The measured rates of a rank's layers and logits; with a `product_dtype`, one of linear layers in that dtype
        and attention in the job's."""
        device, tokens = self._device(work.rank), work.batch.tokens
        layer, documents = self.spec.layers[work.runs[0].start], (work.batch.lengths, work.batch.before)
        if self.product_dtype is None:
            part = 1.0
            if work.tp > 1:
                uncut = layer_flops(self.spec, layer, cut_stage(self.spec, (1,))[0], *documents)
                part = layer_flops(self.spec, layer, work.cut, *documents) / uncut
            rate = device.cut_rate(self.facts.dtype, tokens, part)
            if self.plan.schedule == "zero_bubble":
                rate /= device.split_backward_factor
            logits = device.logits_rate(self.facts.dtype, work.batch.target_tokens)
            return ConstantRate(self.spec, self.plan, self.facts, work, rate, logits)
        rate = device.matrix_rate(self.facts.dtype, tokens)
        attention = attention_flops(self.spec, layer, work.cut, *documents)
        whole = layer_flops(self.spec, layer, work.cut, *documents)
        linear = (whole - attention) / device.matrix_rate(self.product_dtype, tokens)
        return ConstantRate(self.spec, self.plan, self.facts, work, whole / (linear + attention / rate))

    def peak(self) -> float:
        """Peak flop/s of all devices together."""
        dtype = self.product_dtype or self.facts.dtype
        return sum(self._device(rank).peak(dtype) for rank in range(len(self.devices)))

    def mfu(self, seconds: float) -> float:
        """Model flops utilization of a step of so many seconds: its flops over what all devices reach at their peak
        (2204.02311, appendix B). A prompt that completions share counts once, as in the seconds."""
        facts, before = self.facts.in_ring(self.plan.cp), tuple[int, ...]()
        lengths, count = facts.documents or (facts.seq_len,), facts.global_batch_size
        targets = sum(lengths) if facts.target_tokens is None else facts.target_tokens
        if facts.shared_prompts is not None:
            lengths, before, count = facts.lengths, facts.before, facts.microbatches
            targets *= facts.microbatch_size
        is_frozen, below = facts.adapter is not None, forward_only_layers(self.spec, facts)
        of_one = training_flops(self.spec, lengths, min(targets, sum(lengths)), is_frozen, before, below)
        return of_one * count / (seconds * self.peak())

    def _device(self, rank: int) -> Device:
        return self.cluster.devices[self.devices[rank]]

    def _not_hidden(self, work: RankWork, sent: Traffic, replica: ReplicaStep, links: PlacedLinks) -> float:
        """Seconds of a rank's all-reduces of gradients that overlap with computing only where it has a core to
        spare."""
        if self._device(work.rank).has_spare_core:
            return 0.0
        sums = sum(sending_seconds(getattr(sent, group), links.of(work.rank, group)) for group in ("dp", "edp"))
        return max(0.0, sums - replica.gradients)

    def _replication(self, work: RankWork, step: StepPrediction) -> float:
        """Seconds by which snapshots delay the next step, in which they overlap: the rank's own on its way, or those
        that it is sent, one after another through its port. A mean over all steps."""
        rank, here = work.rank, self.devices[work.rank]
        snapshots, seconds = self._snapshots[rank], 0.0
        if snapshots.sent:
            seconds = sending_seconds(snapshots.sent, self.cluster.link(here, self.devices[self._holders[rank]]))
        if snapshots.received:
            link = worst(self.cluster.link(self.devices[source], here) for source in self._sources[rank])
            seconds = max(seconds, sending_seconds(snapshots.received, link))
        hidden = step.seconds if self._device(rank).has_spare_core else 0.0
        return max(0.0, seconds - hidden) / self.facts.mirror_steps if seconds else 0.0

    def _update(self, work: RankWork) -> float:
        """Seconds of the optimizer, of the rank's own weights or of the part that each parameter server has."""
        plan, parameters = self.plan, [one for unit in work.learned(self.spec) for one in unit]
        if plan.servers:
            slowest = max(map(self._update_of_one, server_ranks(plan)))
            return slowest * sum(map(padded_elements, parameters)) / plan.servers
        elements = sum(range_elements(one, work) if plan.zero else padded_elements(one) for one in parameters)
        return self._update_of_one(work.rank) * elements

    def _update_of_one(self, rank: int) -> float:
        """Seconds for an element: as measured, or of its traffic through memory by the roofline model."""
        device = self._device(rank)
        if device.update_seconds or self.execution is None:
            return device.update_seconds
        return update_seconds(self.facts, device, self.execution)

    def _disk(self, memory: RankMemory) -> float:
        """Seconds in which a rank reads and writes the states that lie on its disk."""
        speed = self._device(memory.rank).disk_bandwidth
        if not speed:
            raise PlanError("the plan keeps state on disk and a node has no disk speed", "give the node disk = SPEED")
        return 2 * memory.on_disk / speed


SAME: dict[str, Callable[[Coordinates, int], tuple[int, ...]]] = {
    "tp": lambda at, ep: (at.replica, at.stage, at.cp),
    "cp": lambda at, ep: (at.replica, at.stage, at.tp),
    "dp": lambda at, ep: (at.stage, at.tp),
    "ep": lambda at, ep: (at.replica // ep, at.stage, at.cp, at.tp),
    "edp": lambda at, ep: (at.replica % ep, at.stage, at.tp),
    "replica": lambda at, ep: (at.replica, at.cp),
    SERVERS: lambda at, ep: tuple(at),
}
"""For each group, a key that its members have in common, so that their link is looked up once."""


class PlacedLinks:
    """The links of a placed plan (`SimulatedLinks`)."""

    def __init__(self, placed: PlacedPlan) -> None:
        self.placed = placed
        self.known: dict[tuple[object, ...], LinkSpeed] = {}

    def of(self, rank: int, group: str) -> LinkSpeed:
        """The slowest link among all members of a rank's group, as they wait for one another; with hierarchical
        collectives a link over which they take as long."""
        plan = self.placed.plan
        key = (group, *SAME[group](plan.coordinates(rank), plan.ep))
        if key not in self.known:
            ranks = [rank, *server_ranks(plan)] if group == SERVERS else group_of(plan, rank, group)
            self.known[key] = self._link(group, [self.placed.devices[member] for member in ranks])
        return self.known[key]

    def _link(self, group: str, devices: Sequence[int]) -> LinkSpeed:
        cluster, execution = self.placed.cluster, self.placed.execution
        if execution is None or execution.collectives == "flat":
            return cluster.slowest_link(devices)
        return exchange_link(cluster, devices) if group == "ep" else gather_link(cluster, devices)

    def hops(self, replica: int) -> Mapping[tuple[int, int], LinkSpeed]:
        """Between neighbouring stages, the slowest of the links from each rank to the ranks that take its result."""
        return {pair: self._hop(replica, *pair) for a, b in neighbours(self.placed.plan) for pair in ((a, b), (b, a))}

    def one_port(self, replica: int) -> Collection[int]:
        """Stages with a device that sends to other nodes in both directions: what leaves its node does so by one
        port."""
        node_of, beyond = self.placed.cluster.node_of, defaultdict[int, list[set[int]]](list)
        for here, there in dict.fromkeys(pair for a, b in neighbours(self.placed.plan) for pair in ((a, b), (b, a))):
            wires = self._wires(replica, here, there)
            beyond[here].append({source for source, target in wires if node_of[source] != node_of[target]})
        return [stage for stage, senders in beyond.items() if len(senders) > 1 and set.intersection(*senders)]

    def _hop(self, replica: int, here: int, there: int) -> LinkSpeed:
        return worst(self.placed.cluster.link(*wire) for wire in self._wires(replica, here, there))

    def _wires(self, replica: int, here: int, there: int) -> list[tuple[int, int]]:
        """Pairs (source, target) of devices between which one stage sends its hidden states to another."""
        plan, devices = self.placed.plan, self.placed.devices
        tp_here, tp_there = plan.stages[here].tp, plan.stages[there].tp
        wires: list[tuple[int, int]] = []
        for cp, tp in product(range(plan.cp), range(tp_here)):
            at = plan.rank_of(Coordinates(replica, here, cp, tp))
            ends = (plan.rank_of(Coordinates(replica, there, cp, target)) for target in targets(tp, tp_here, tp_there))
            wires += [(devices[at], devices[end]) for end in ends]
        return wires


def _ending_at(step: StepPrediction, end: float) -> StepPrediction:
    """The step if it ends `end` seconds after its beginning, not when its slowest replica has done its part."""
    more, rate = end - step.seconds, step.tokens_per_second * (step.seconds / end if end else 1.0)
    return replace(step, seconds=end, gradients=step.gradients + more, tokens_per_second=rate)
