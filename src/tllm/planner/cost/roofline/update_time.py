"""Seconds in which gradients and weights go through memory once a step, however few tokens it has.

For each element of the weights, at w bytes of full precision, b of an activation and s states of the optimizer:

    an update           its gradient read, weight and states read and written, a 16-bit weight written, and the
                        trainer's passes over gradients before it:   (1 + 2 + 2 s + passes) w  (+ b)
    an accumulation     after each microbatch but the first, where no product does it: the gradient of the microbatch
                        read, the sum read and written:              b + 2 w

Both are bound by memory: AdamW has about a dozen flops for each element (1412.6980), one for every four bytes.
"""

from __future__ import annotations

from tllm.planner.cluster.device import Device
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.rank_work import TrainingFacts


def update_seconds(facts: TrainingFacts, device: Device, execution: Execution) -> float:
    """Of one element's update, on a device on which it was not measured."""
    passes = 1 + 2 + 2 * facts.states + execution.gradient_passes
    moved = passes * facts.full_precision_bytes + facts.learned_bytes * facts.float32_weights
    return moved / device.memory_bandwidth


def accumulation_seconds(elements: float, microbatches: int, facts: TrainingFacts, device: Device) -> float:
    """Of so many elements' gradients after one of a step's microbatches, on an average over them."""
    moved = facts.item_bytes + 2 * facts.full_precision_bytes
    return elements * moved * (microbatches - 1) / max(1, microbatches) / device.memory_bandwidth
