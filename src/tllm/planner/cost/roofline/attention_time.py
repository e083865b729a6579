"""Seconds of the core of attention (scores and values) on one rank, in one kernel or operation by operation.

In one kernel (FlashAttention, 2205.14135) scores never leave the chip, and those that the causal mask hides are not
computed. Forward two products for each pair of a query and a key, backward five.

Operation by operation, for each head and each document of n tokens all n x n scores are written, at b bytes each:

    forward    scores [n, H] x [H, n], softmax (read and written: 2 b), values [n, n] x [n, H]
    backward   four products of the same two shapes, softmax (its result and gradients read, gradients written: 3 b)
    dropout    forward read and written, and a mask of one byte (2 b + 1); backward the same

where scaling and masking are part of the kernel for softmax. A product takes the longer of its flops and of its bytes,
in which the scores count. These are the "5 a s / h" activations of Korthikanti et al. (2205.05198, section 4.1).
"""

from __future__ import annotations

from typing import NamedTuple

from tllm.planner.cluster.device import Device
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.activations import Microbatch
from tllm.planner.cost.flops import attention_flops
from tllm.planner.cost.roofline.matrix_product import MatrixProduct
from tllm.spec.cut import Cut, as_layer, size
from tllm.spec.model_spec import LayerSpec, ModelSpec

FUSED_BACKWARD = 2.5
"""Of one kernel, seconds of the backward pass over those of the forward pass."""

SOFTMAX_FORWARD, SOFTMAX_BACKWARD, DROPOUT = 2, 3, 2
"""How often a score is read or written."""

MASK_BYTES = 1
"""Of dropout, for each score."""


class AttentionSeconds(NamedTuple):
    """Of one microbatch through one layer. `forward` and `backward` include elementwise operations on scores."""

    forward: float
    backward: float
    forward_elementwise: float = 0.0
    backward_elementwise: float = 0.0


def attention_seconds(
    spec: ModelSpec, layer: LayerSpec, cut: Cut, batch: Microbatch, device: Device, execution: Execution, dtype: str
) -> AttentionSeconds:
    """As the trainer of `execution` computes it. A gated delta net has no scores, and is always one kernel."""
    share = batch.tokens / sum(batch.lengths)
    if execution.scores == "fused" or layer.delta:
        rate = execution.attention * device.matrix_rate(dtype, layer.head_dim or spec.head_dim)
        forward = share * attention_flops(spec, layer, cut, batch.lengths, batch.before) / rate
        return AttentionSeconds(forward, FUSED_BACKWARD * forward)
    own, of_layer = as_layer(spec, layer, cut)
    heads, width, item = size(of_layer.heads), own.head_dim, batch.item_bytes
    products = [
        product.seconds(device, dtype, item)
        for length, before in batch.documents
        for product in (
            MatrixProduct(length, width, before + length, heads),
            MatrixProduct(length, before + length, width, heads),
        )
    ]
    computed = share * sum(products)
    scores = share * heads * sum(length * (before + length) for length, before in batch.documents)
    dropped = (execution.scores == "dropout") * (DROPOUT * item + MASK_BYTES)
    early = scores * (SOFTMAX_FORWARD * item + dropped) / device.memory_bandwidth
    late = scores * (SOFTMAX_BACKWARD * item + dropped) / device.memory_bandwidth
    return AttentionSeconds(computed + early, 2 * computed + late, early, late)
