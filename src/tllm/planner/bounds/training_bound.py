"""`least_step_seconds`: what a training step takes at least on a cluster, whatever the plan.

The bound is a linear relaxation. Any part of a layer, of a microbatch and of the logits may be computed on any device,
at the best rate that the device has for as many rows or fewer; messages, bubbles, updates and recomputation take no
time. With W flops of all layers and V flops of all logits in a step, forward and backward, and rates r_i and g_i of
device i for them, it is

    least T such that x_i / r_i + y_i / g_i <= T for every device i, sum x_i = W, sum y_i = V
        = max over q >= 0 of (W + q V) / sum_i max(r_i, q g_i)

where the second line is the dual program, whose best q is one of the ratios r_i / g_i. Of memory it only knows that a
device without room for a process takes no part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tllm.planner.cluster.device import Cluster, Device, Points
from tllm.planner.cluster.profile import between
from tllm.planner.cost.flops import BACKWARD, layer_flops, logits_flops
from tllm.planner.cost.rank_work import TrainingFacts
from tllm.planner.memory.heap import TRAINER_BYTES
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec

MOST_PRICES = 64
"""Of more ratios of a device's two rates, so many are tried: each gives a bound, and all together the best one."""

Rates = tuple[float, float]
"""Flop/s of layers and of logits."""


def least_step_seconds(
    spec: ModelSpec, cluster: Cluster, facts: TrainingFacts, microbatch_sizes: Sequence[int]
) -> float:
    """Seconds that every plan takes at least with microbatches of one of these sizes, as tllm carries it out.

    The size of `facts` itself does not count. Raises ConfigError where a device has no speed in the job's dtype.
    """
    devices = Counter(device for device in cluster.devices if device.memory > TRAINER_BYTES)
    sized = (replace(facts, microbatch_size=size) for size in microbatch_sizes if size <= facts.global_batch_size)
    return min((_least(spec, devices, one) for one in sized), default=0.0) if devices else 0.0


def _least(spec: ModelSpec, devices: Counter[Device], facts: TrainingFacts) -> float:
    """The same with microbatches of the size of `facts`."""
    (whole,) = cut_stage(spec, (1,))
    tokens = sum(facts.lengths)
    of_row = facts.seq_len if facts.target_tokens is None else facts.target_tokens
    targets = min(tokens, of_row * facts.microbatch_size)
    # The weights of a model beside an adapter have no gradients.
    passes = (1 + BACKWARD if facts.adapter is None else BACKWARD) * facts.microbatches
    layers = passes * sum(layer_flops(spec, layer, whole, facts.lengths, facts.before) for layer in spec.layers)
    logits = passes * logits_flops(spec, whole, targets)
    rates = [(_best_rates(device, facts, tokens, targets), count) for device, count in devices.items()]
    ratios = sorted({of_layers / of_logits for (of_layers, of_logits), _ in rates})
    prices = ratios[:: -(-len(ratios) // MOST_PRICES)]
    return max(
        (layers + price * logits) / sum(count * max(r, price * g) for (r, g), count in rates) for price in prices
    )


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
