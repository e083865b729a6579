"""Seconds of a rank's passes through its layers, by a roofline model of each product and of elementwise operations.

    a product [m, k] x [k, n]   the longer of 2 m n k / rate(smallest of m, n, k) and its bytes / B
    attention scores, values    as in `attention_time`
    elementwise operations      touches x (bytes that a layer of torch's steps keeps, or the loss) / B, two fifths of
                                it forward
    accumulated gradients       as in `update_time`, where no product does it
    products in another dtype   five bytes of traffic more for each element that is cast: it is read to find the
                                largest one, read again, and written

The rate is the device's, in flop/s for a size (Williams et al. 2009, Roofline), and B the bandwidth of its memory in
bytes per second. The gradient of a product takes as long as the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from tllm.planner.cluster.device import Device
from tllm.planner.cluster.execution import Execution
from tllm.planner.cost.activations import Microbatch, layer_bytes, logits_bytes
from tllm.planner.cost.flops import (
    BACKWARD,
    attention_flops,
    attention_matrices,
    head_width,
    layer_flops,
    logits_flops,
)
from tllm.planner.cost.grid_work import hidden_part
from tllm.planner.cost.rank_bytes import as_learned
from tllm.planner.cost.rank_work import RankWork, TrainingFacts
from tllm.planner.cost.roofline.attention_time import attention_seconds
from tllm.planner.cost.roofline.matrix_product import MatrixProduct
from tllm.planner.cost.roofline.update_time import accumulation_seconds
from tllm.planner.cost.stage_team import OPERATIONS
from tllm.spec.cut import Cut, size
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.plan import Plan

FORWARD_TOUCHES = 2 / 5
"""The forward pass's share of elementwise memory traffic."""

CAST_BYTES = 5
"""Bytes of memory traffic for each element that is cast to another dtype."""


class PassSeconds(NamedTuple):
    """Seconds of one microbatch through one run of layers."""

    forward: float
    backward_input: float
    """The half of the backward pass that makes the gradient of the run's input."""
    backward_weight: float
    """The half that makes the gradients of weights."""
    recompute: float
    """What the backward pass computes a second time."""
    attention: float
    """Of `forward`, attention's scores and values."""
    memory: float
    """Of all four passes, elementwise operations."""

    @property
    def whole(self) -> float:
        """All four passes."""
        return self.forward + self.backward_input + self.backward_weight + self.recompute

    @property
    def forward_alone(self) -> PassSeconds:
        """The same without a backward pass; of `memory` the forward pass's share where nothing is recomputed."""
        forward = min(self.forward, FORWARD_TOUCHES * self.memory)
        return PassSeconds(self.forward, 0.0, 0.0, 0.0, self.attention, forward)

    def with_value_pass(self, recompute: str) -> PassSeconds:
        """The same where what has gradients is computed once more without them: the forward pass, or where layers are
        computed again in the backward pass, and only then with gradients, that and the logits."""
        again = self.recompute if recompute == "layer" else 0.0
        return self._replace(forward=2 * self.forward - again, recompute=self.recompute + again)


class ComputeTime(Protocol):
    """How long a rank computes."""

    def pass_seconds(self, run: range) -> PassSeconds:
        """For one microbatch through a run of layers, and the logits if it ends the model."""
        ...


class ConstantRate:
    """All products of layers at the same rate, `flops` in flop/s, those of logits at `logits` or the same (0), and
    nothing else takes time."""

    def __init__(
        self, spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, flops: float, logits: float = 0.0
    ) -> None:
        self.spec, self.plan, self.facts, self.work = as_learned(spec, facts.adapter), plan, facts, work
        self.flops, self.logits = flops, logits or flops

    def pass_seconds(self, run: range) -> PassSeconds:
        spec, cut, batch = self.spec, self.work.cut, self.work.batch
        share = batch.tokens / sum(batch.lengths) / self.flops
        layers = [spec.layers[number] for number in run]
        whole = share * sum(layer_flops(spec, layer, cut, batch.lengths, batch.before) for layer in layers)
        core = share * sum(attention_flops(spec, layer, cut, batch.lengths, batch.before) for layer in layers)
        again = {"none": 0.0, "selective": core, "layer": whole}[self.plan.recompute]
        end = logits_flops(spec, cut, batch.target_tokens) / self.logits if run.stop == spec.num_layers else 0
        forward = whole + end
        # Attention's core has no weights: all of its gradients are those of inputs.
        return PassSeconds(forward, (BACKWARD - 1) * forward + core, forward - core, again, core, 0.0)


def _by_steps(batch: Microbatch) -> Microbatch:
    """As `touches` has it: what operations move is told beside what they keep where each is a step of its own."""
    return replace(batch, is_lean=False)


class _Again(NamedTuple):
    """The shares of a forward pass that a backward pass computes a second time: of a layer, of attention's core."""

    layer: float = 0.0
    core: float = 0.0


class LayerTimeModel:
    """A rank on a device, by the roofline model. `product_dtype`: that of linear layers' products, if not the job's."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        facts: TrainingFacts,
        work: RankWork,
        device: Device,
        execution: Execution,
        product_dtype: str | None = None,
    ) -> None:
        self.spec, self.plan, self.facts, self.work = as_learned(spec, facts.adapter), plan, facts, work
        self.hidden = hidden_part(self.spec, plan.grid_of(work.at.stage))
        """With the columns of hidden states that the rank has."""
        self.device, self.execution = device, execution
        self.product_dtype = product_dtype or facts.dtype
        self.known: dict[LayerSpec, PassSeconds] = {}

    def pass_seconds(self, run: range) -> PassSeconds:
        parts = [self._layer(self.spec.layers[number]) for number in run]
        if run.stop == self.spec.num_layers:
            parts.append(self._logits())
        return PassSeconds(*map(sum, zip(*parts, strict=True)))

    def _layer(self, layer: LayerSpec) -> PassSeconds:
        if layer not in self.known:
            self.known[layer] = self._layer_passes(layer)
        return self.known[layer]

    def _layer_passes(self, layer: LayerSpec) -> PassSeconds:
        spec, work, device = self.spec, self.work, self.device
        linear = list(_products(spec, layer, work.cut, work.batch.tokens, self.plan.ep))
        products = sum(self._seconds(product, self.product_dtype) for product in linear)
        core = attention_seconds(spec, layer, work.cut, work.batch, device, self.execution, self.facts.dtype)
        kept = layer_bytes(self.hidden, layer, work.cut, _by_steps(work.batch))
        moved = self.execution.touches * kept / device.memory_bandwidth
        into, out = self._casts(linear)
        starts = OPERATIONS * device.operation_seconds
        early, late = FORWARD_TOUCHES * moved + into + starts, (1 - FORWARD_TOUCHES) * moved + out + starts
        forward = products + core.forward + early
        again = self._recomputed()
        added = self._accumulated(linear)
        memory = early + core.forward_elementwise + late + core.backward_elementwise + added
        return PassSeconds(
            forward,
            products + core.backward + late,
            products + added,
            again.layer * forward + again.core * core.forward,
            core.forward,
            memory + again.layer * (early + core.forward_elementwise) + again.core * core.forward_elementwise,
        )

    def _recomputed(self) -> _Again:
        """What is computed a second time."""
        if self.execution.recompute_share is not None:
            return _Again(layer=self.execution.recompute_share)
        return _Again(layer=float(self.plan.recompute == "layer"), core=float(self.plan.recompute == "selective"))

    def _accumulated(self, linear: Sequence[MatrixProduct]) -> float:
        """Seconds in which gradients of weights are added to those of earlier microbatches."""
        if self.execution.fused_accumulation:
            return 0.0
        elements = sum(product.copies * product.inner * product.columns for product in linear)
        return accumulation_seconds(elements, self.work.microbatches, self.facts, self.device)

    def _logits(self) -> PassSeconds:
        """Logits and loss, in the dtype of the job."""
        batch, cut = self.work.batch, self.work.cut
        head = MatrixProduct(batch.target_tokens, self.spec.hidden_size, head_width(self.spec, cut))
        product, added = self._seconds(head, self.facts.dtype), self._accumulated([head])
        touches = self.execution.touches if self.execution.loss_touches is None else self.execution.loss_touches
        moved = touches * logits_bytes(self.hidden, cut, _by_steps(batch)) / self.device.memory_bandwidth
        forward = product + FORWARD_TOUCHES * moved
        return PassSeconds(forward, product + (1 - FORWARD_TOUCHES) * moved, product + added, 0.0, 0.0, moved + added)

    def _seconds(self, product: MatrixProduct, dtype: str) -> float:
        return product.seconds(self.device, dtype, self.facts.item_bytes)

    def _casts(self, linear: Sequence[MatrixProduct]) -> tuple[float, float]:
        """Seconds of casts: of the products' inputs forward, and of what comes back into their gradients."""
        if self.product_dtype == self.facts.dtype:
            return 0.0, 0.0
        into = sum(product.copies * product.rows * product.inner for product in linear)
        back = sum(product.copies * product.rows * product.columns for product in linear)
        return CAST_BYTES * into / self.device.memory_bandwidth, CAST_BYTES * back / self.device.memory_bandwidth


def _products(spec: ModelSpec, layer: LayerSpec, cut: Cut, tokens: int, ep: int) -> Iterator[MatrixProduct]:
    """The forward products of one layer's linear layers: qkv, attention's output, gate and up, down."""
    D, moe = spec.hidden_size, layer.moe
    for matrix in attention_matrices(spec, layer, cut):
        yield MatrixProduct(tokens, matrix.inner, matrix.columns)._replace(copies=matrix.copies)
    if moe is None:
        yield from _mlp(tokens, D, size(cut.width), spec.into_mlp)
        return
    yield MatrixProduct(tokens, D, moe.num_experts)
    rows = tokens * ep * moe.top_k / moe.num_experts
    for product in _mlp(rows, D, size(cut.expert_width)):
        yield product._replace(copies=size(cut.experts) / ep)
    if moe.shared_width:
        yield from _mlp(tokens, D, size(cut.shared_width))


def _mlp(rows: float, width: int, inner: int, into: int = 2) -> Iterator[MatrixProduct]:
    yield MatrixProduct(rows, width, into * inner)
    yield MatrixProduct(rows, inner, width)
