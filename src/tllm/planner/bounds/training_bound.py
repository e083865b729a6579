"""`least_step_seconds`: what a training step takes at least on a cluster, with any plan of the forms that are searched.

Those have as many tensor-parallel ranks in each stage as in the others, no parameter servers, and at most MOST_CHUNKS
chunks; and of those that are searched it holds for all but grids of ranks (`is_bounded`). A plan of another form may
take less: with tensor parallelism in some stages alone it waits for the sums of their layers alone, and a grid sends
less than those take.

Every plan obeys a linear relaxation. Any part of a layer, of a microbatch and of the logits may be computed on any
device, at the best rate that the device has for as many rows or fewer; messages, bubbles, updates and recomputation
take no time. With W flops of all layers and V flops of all logits in a step, forward and backward, and rates r_i and
g_i of device i for them, it is

    least T such that x_i / r_i + y_i / g_i <= T for every device i, sum x_i = W, sum y_i = V
        = max over q >= 0 of (W + q V) / sum_i max(r_i, q g_i)

where the second line is the dual program, whose best q is one of the ratios r_i / g_i. Of memory it only knows that a
device without room for a process takes no part.

Beyond that a plan is one of three kinds, and the least of their bounds counts:

- **It recomputes layers**: W has a forward pass more.
- **It has tensor parallelism**: in each layer ranks wait for their sums, at the best over the fastest link for messages
  of any length. A stage of n ranks takes as long as the mean
  of what its ranks compute and what the one that waits least waits, so n w of its devices' time is lost for a wait of
  w; as n is two or more, at least 2 w max(r_i, q g_i) of the slowest device is added to W + q V.
- **Neither**: each layer is one stage's, and that stage sums its gradients (`cut_bound`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tllm.planner.bounds.replica_microbatches import MOST_CHUNKS
from tllm.planner.bounds.whole_layers import RankSize, least_of_whole_layers
from tllm.planner.cluster.device import Cluster, Device, Points
from tllm.planner.cluster.device_kinds import best_bandwidths
from tllm.planner.cluster.profile import between
from tllm.planner.cost.flops import attention_flops, layer_flops, logits_flops
from tllm.planner.cost.rank_work import (
    LayerGradients,
    TrainingFacts,
    both_passes,
    forward_only_layers,
    layer_gradients,
)
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.plan import Plan

MOST_PRICES = 64
"""Of more ratios of a device's two rates, so many are tried: each gives a bound, and all together the best one."""

FEW_DEVICES, RINGS = 16, (1, 2, 4, 8, 16)
"""Ranks of context parallelism that the search tries on more devices than these (`promising_meshes.WIDTHS`); on fewer
it tries all numbers."""

Rates = tuple[float, float]
"""Flop/s of layers and of logits."""


def least_step_seconds(
    spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, microbatch_sizes: Sequence[int]
) -> float:
    """Seconds that every plan of the forms that are searched takes at least with microbatches of one of these sizes, as
    tllm carries it out; where the cluster's `execution` has hierarchical collectives, as `tllm simulate` times these.
    Nothing else of an `execution` counts: the bound does not hold for messages that overlap with products, say.

    The size of `facts` itself does not count. Raises ConfigError where a device has no speed in the job's dtype.
    """
    cluster = _as_timed(cluster)
    devices, sized = _taking_part(cluster), _sized(facts, microbatch_sizes)
    if not devices or not sized:
        return 0.0
    kinds = Counter(cluster.devices[place] for place in devices)
    relaxed = min(_least(spec, kinds, one) for one in sized)
    again = min(_least(spec, kinds, one, recomputed=1) for one in sized)
    link = _fastest_message(cluster)
    cut = min(_least(spec, kinds, one, link=link) for one in sized) if len(devices) > 1 else math.inf
    most = min(again, cut)
    if most <= relaxed:
        return relaxed
    memories = [float(cluster.devices[place].memory - TRAINER_BYTES) for place in devices]
    sizes = [
        _of_rank(one.in_ring(ring), ring, [cluster.devices[place] for place in devices])
        for one in sized
        for ring in _rings(len(cluster), facts)
    ]
    return max(relaxed, least_of_whole_layers(spec, sizes, _fastest_sends(cluster, devices), memories, relaxed, most))


def is_bounded(plan: Plan, devices: int, facts: TrainingFacts) -> bool:
    """Whether the bound for a job on so many devices holds for a plan: one of a form that is searched, without a
    grid."""
    has_one_tp = len({stage.tp for stage in plan.stages}) == 1 and plan.tensor == "1d"
    return has_one_tp and not plan.servers and plan.chunks <= MOST_CHUNKS and plan.cp in _rings(devices, facts)


def _rings(devices: int, facts: TrainingFacts) -> Sequence[int]:
    """How many ranks of context parallelism may share a microbatch."""
    tried = range(1, devices + 1) if devices <= FEW_DEVICES else RINGS
    return [ranks for ranks in tried if ranks <= min(devices, facts.most_ranks_of_row)]


def relaxed_step_seconds(
    spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, microbatch_sizes: Sequence[int]
) -> float:
    """The linear relaxation alone: products, spread over all devices by speed. Arguments are as above."""
    cluster = _as_timed(cluster)
    kinds = Counter(cluster.devices[place] for place in _taking_part(cluster))
    return min((_least(spec, kinds, one) for one in _sized(facts, microbatch_sizes)), default=0.0) if kinds else 0.0


def _as_timed(cluster: Cluster) -> Cluster:
    """The cluster with what devices reach at best, where collectives are hierarchical: such runs are timed by the
    roofline model, which looks up each product by a size of its own (`cost.roofline.layer_time`)."""
    if cluster.execution.collectives == "flat":
        return cluster
    return replace(cluster, devices=tuple(map(_at_best, cluster.devices)))


def _at_best(device: Device) -> Device:
    rates = ((dtype, ((1.0, max(rate for _, rate in points)),)) for dtype, points in device.flop_rates)
    return replace(device, flop_rates=tuple(rates), logits_rates=())


def _taking_part(cluster: Cluster) -> list[int]:
    return [place for place, device in enumerate(cluster.devices) if device.memory > TRAINER_BYTES]


def _sized(facts: TrainingFacts, microbatch_sizes: Sequence[int]) -> list[TrainingFacts]:
    return [replace(facts, microbatch_size=size) for size in microbatch_sizes if size <= facts.global_batch_size]


def _least(
    spec: ModelSpec, devices: Counter[Device], facts: TrainingFacts, recomputed: int = 0, link: float = math.inf
) -> float:
    """The relaxation with microbatches of the size of `facts`, where layers are `recomputed` so often, and ranks that
    share a layer send over this link (bytes per second; infinite: where none is shared)."""
    (whole,) = cut_stage(spec, (1,))
    tokens, targets = _tokens(facts)
    below, layers = forward_only_layers(spec, facts), 0.0
    for number, layer in enumerate(spec.layers):
        forward = layer_flops(spec, layer, whole, facts.lengths, facts.before)
        core = attention_flops(spec, layer, whole, facts.lengths, facts.before)
        layers += forward if number < below else both_passes(facts, forward, core) + recomputed * forward
    layers *= facts.microbatches
    sums = sum(_sums(layer, layer_gradients(spec, facts, number)) for number, layer in enumerate(spec.layers))
    waits = facts.microbatches * sums * tokens * spec.hidden_size * facts.item_bytes / link
    logits = facts.microbatches * both_passes(facts, logits_flops(spec, whole, targets))
    rates = [(_best_rates(device, facts, tokens, targets), count) for device, count in devices.items()]
    ratios = sorted({of_layers / of_logits for (of_layers, of_logits), _ in rates})
    prices = ratios[:: -(-len(ratios) // MOST_PRICES)]
    return max(
        (layers + price * logits + 2 * waits * min(max(r, price * g) for (r, g), _ in rates))
        / sum(count * max(r, price * g) for (r, g), count in rates)
        for price in prices
    )


def _sums(layer: LayerSpec, gradients: LayerGradients) -> float:
    """Sums over ranks that share a layer, forward and backward: all-reduces, or with sequence parallelism gathers and
    scatters, each of which is half of one; whichever are fewer."""
    halves = 2 + layer.hidden_sums + gradients.left(layer) + gradients.inputs
    return min(layer.hidden_sums + gradients.inputs, halves / 2)


def _tokens(facts: TrainingFacts) -> tuple[int, int]:
    """Tokens of a microbatch, and those that the loss is computed for."""
    return sum(facts.lengths), facts.predicted


def _of_rank(facts: TrainingFacts, ranks: int, devices: Sequence[Device]) -> RankSize:
    """A size of microbatches that so many ranks share."""
    whole, targets = _tokens(facts)
    tokens = -(-whole // (2 * ranks)) * 2 if ranks > 1 else whole
    known = {device: _best_rates(device, facts, tokens, -(-targets * tokens // whole)) for device in set(devices)}
    return RankSize(facts, ranks, [known[device] for device in devices])


def _fastest_message(cluster: Cluster) -> float:
    """The most bytes per second of a message of any length between any two devices; infinite without a link."""
    links = [*(link for _, link in cluster.pairs), *(tier.link for tier in cluster.tiers)]
    links += filter(None, (cluster.default, *cluster.inside))
    return max((max(link.bandwidth, link.short_bandwidth) for link in links), default=math.inf)


def _fastest_sends(cluster: Cluster, devices: Sequence[int]) -> list[float]:
    """For each device the most bytes per second of gradients, none of which count as short messages; infinite where it
    has no link.

    Of hierarchical collectives a device that is alone on its node sends less than its part over its own links. With
    all levels together they take no less than over the fastest link of any device (`cost.link_levels`)."""
    best, of_node = best_bandwidths(cluster), Counter(cluster.node_of)
    nodes = [cluster.node_of[device] for device in devices]
    inside = [cluster.inside[node] if of_node[node] > 1 else None for node in nodes]
    sends = [
        max(best[device], link.bandwidth if link is not None else 0.0) or math.inf
        for device, link in zip(devices, inside, strict=True)
    ]
    return sends if cluster.execution.collectives == "flat" else [max(sends)] * len(sends)


def _best_rates(device: Device, facts: TrainingFacts, tokens: int, targets: int) -> Rates:
    """The best flop/s of layers with up to so many tokens, and of logits with up to so many targets."""
    of_logits = dict(device.logits_rates or device.flop_rates)
    layers, logits = device.matrix_rate(facts.dtype, tokens), device.logits_rate(facts.dtype, targets)
    split = max(1.0, 1 / device.split_backward_factor)
    return (
        split * max(layers, _best(dict(device.flop_rates)[facts.dtype], tokens)),
        split * max(logits, _best(of_logits[facts.dtype], targets)),
    )


def _best(points: Points, rows: float) -> float:
    """The highest of the measured values for up to so many rows; between two points the value is between theirs."""
    return max((value for at, value in points if at <= rows), default=between(points, rows))
