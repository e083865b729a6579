"""A training plan on the devices of a cluster: each rank's speed, the links of each of its groups, a step's seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from tllm.ground.errors import PlanError
from tllm.planner.cluster import Cluster, Device, worst
from tllm.planner.flops import attention_flops, layer_flops, logits_flops, training_flops
from tllm.planner.predict import Prediction, predict_step, seconds_of
from tllm.planner.ranks import RankWork, TrainingFacts, deal, work_of
from tllm.planner.simulate import LinkSpeed
from tllm.planner.traffic import Traffic
from tllm.planner.training import RankMemory, padded, training_bytes
from tllm.spec.axes import SERVERS, members, neighbours, targets
from tllm.spec.model import ModelSpec
from tllm.spec.plan import Coordinates, Plan


@dataclass(frozen=True)
class Placed:
    """A plan whose rank r runs on `devices[r]`.

    `products`: the dtype in which linear layers are multiplied, where it is not that of the job.
    """

    spec: ModelSpec
    plan: Plan
    facts: TrainingFacts
    cluster: Cluster
    devices: tuple[int, ...]
    products: str | None = None

    def __post_init__(self) -> None:
        if len(self.devices) != self.plan.world_size:
            raise PlanError(f"the plan has {self.plan.world_size} ranks and {len(self.devices)} devices are given")

    @cached_property
    def replicas(self) -> list[int]:
        """Those that stand for all: of several that have the same work on the same devices, the first."""
        size, ep = self.plan.replica_size, self.plan.ep
        seen = dict[object, int]()
        for replica, count in enumerate(deal(self.facts.microbatches, self.plan.dp)):
            first = replica // ep * ep * size
            pattern = self.cluster.pattern(self.devices[first : first + ep * size])
            seen.setdefault((count, replica % ep, pattern), replica)
        return list(seen.values())

    def predict(self) -> Prediction:
        """A step, and after it the update. What is kept on disk is then read and written."""
        replicas = self.replicas
        works = work_of(self.spec, self.plan, self.facts, replicas)
        speeds = [self.speed(work) for work in works]
        links = PlacedLinks(self)
        found = predict_step(self.spec, self.plan, self.facts, speeds, links, replicas)
        after = [
            self._update(work) + self._not_hidden(work, sent, found, links)
            for work, sent in zip(works, found.bytes_sent, strict=True)
        ]
        if self.plan.offload == "disk":
            after += [max(after) + self._disk(one) for one in self.memory(replicas)]
        return _later(found, max(after)) if max(after) else found

    def memory(self, replicas: Sequence[int] | None = None) -> list[RankMemory]:
        """Of the ranks of some replicas, or of all."""
        return training_bytes(self.spec, self.plan, self.facts, replicas)

    def fits(self, memory: Sequence[RankMemory]) -> bool:
        return all(one.total <= self._device(one.rank).memory for one in memory)

    def speed(self, work: RankWork) -> float:
        """Flop/s of a rank: of its layers' products, and of attention where these are in another dtype."""
        device, tokens = self._device(work.rank), work.batch.tokens
        rate = device.matrix_rate(self.facts.dtype, tokens)
        if self.products is None:
            return self._with_logits(work, rate)
        layer, lengths = self.spec.layers[work.runs[0].start], self.facts.lengths
        attention = attention_flops(self.spec, layer, work.cut, lengths)
        whole = layer_flops(self.spec, layer, work.cut, lengths)
        linear = (whole - attention) / device.matrix_rate(self.products, tokens)
        return whole / (linear + attention / rate)

    def _with_logits(self, work: RankWork, rate: float) -> float:
        """Flop/s of layers and of logits together, each at its own."""
        head = self._device(work.rank).logits_rate(self.facts.dtype, work.batch.predicted)
        if head == rate or all(run.stop != self.spec.num_layers for run in work.runs):
            return rate
        logits = logits_flops(self.spec, work.cut, work.batch.predicted)
        share = work.batch.tokens / sum(self.facts.lengths)
        numbers = [number for run in work.runs for number in run]
        layers = sum(layer_flops(self.spec, self.spec.layers[n], work.cut, self.facts.lengths) for n in numbers) * share
        return (layers + logits) / (layers / rate + logits / head)

    def peak(self) -> float:
        """Flop/s of all devices together, at the most."""
        dtype = self.products or self.facts.dtype
        return sum(self._device(rank).peak(dtype) for rank in range(len(self.devices)))

    def mfu(self, seconds: float) -> float:
        """The share of that which a step's flops are."""
        of_row = training_flops(self.spec, self.facts.documents or (self.facts.seq_len,))
        return of_row * self.facts.global_batch_size / (seconds * self.peak())

    def _device(self, rank: int) -> Device:
        return self.cluster.devices[self.devices[rank]]

    def _not_hidden(self, work: RankWork, sent: Traffic, found: Prediction, links: PlacedLinks) -> float:
        """Seconds of a rank's sums of gradients that would pass beside computing, if it had a core for them."""
        if self._device(work.rank).spare:
            return 0.0
        sums = sum(seconds_of(getattr(sent, group), links.of(work.rank, group)) for group in ("dp", "edp"))
        return max(0.0, sums - found.gradients)

    def _update(self, work: RankWork) -> float:
        """Seconds of a rank's optimizer."""
        elements = sum(padded(one) for unit in work.parameters(self.spec) for one in unit)
        return self._device(work.rank).update * elements / (work.replicas if self.plan.zero else 1)

    def _disk(self, memory: RankMemory) -> float:
        speed = self._device(memory.rank).disk
        if not speed:
            raise PlanError("the plan keeps state on disk and a node has no disk speed", "give the node disk = SPEED")
        return 2 * memory.on_disk / speed


class PlacedLinks:
    """The links of a placed plan, for `predict_step`."""

    def __init__(self, placed: Placed) -> None:
        self.placed = placed
        self.known: dict[tuple[int, ...], LinkSpeed] = {}
        self.groups: dict[int, dict[str, list[int]]] = {}

    def of(self, rank: int, group: str) -> LinkSpeed:
        """The slowest among all members of the group: they wait for one another."""
        placed, plan = self.placed, self.placed.plan
        if rank not in self.groups:
            first = plan.replicas * plan.replica_size
            self.groups[rank] = members(plan, rank) | {SERVERS: [rank, *range(first, plan.world_size)]}
        key = tuple(placed.devices[member] for member in self.groups[rank][group])
        if key not in self.known:
            self.known[key] = placed.cluster.slowest(key)
        return self.known[key]

    def hops(self, replica: int) -> Mapping[tuple[int, int], LinkSpeed]:
        """Between neighbouring stages the slowest of the wires from each rank to those that it feeds."""
        return {pair: self._hop(replica, *pair) for a, b in neighbours(self.placed.plan) for pair in ((a, b), (b, a))}

    def _hop(self, replica: int, here: int, there: int) -> LinkSpeed:
        plan, devices = self.placed.plan, self.placed.devices
        one, other = plan.stages[here].tp, plan.stages[there].tp
        found = []
        for cp, tp in product(range(plan.cp), range(one)):
            at = plan.rank_of(Coordinates(replica, here, cp, tp))
            ends = (plan.rank_of(Coordinates(replica, there, cp, target)) for target in targets(tp, one, other))
            found += [self.placed.cluster.link(devices[at], devices[end]) for end in ends]
        return worst(found)


def _later(found: Prediction, seconds: float) -> Prediction:
    total = found.seconds + seconds
    rate = found.tokens_per_second * found.seconds / total
    return replace(found, seconds=total, gradients=found.gradients + seconds, tokens_per_second=rate)
