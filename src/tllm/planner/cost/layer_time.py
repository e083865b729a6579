"""Seconds of a rank's passes through its layers, from the size of every product and what else goes through memory.

    a product [m, k] x [k, n]   the longer of 2 m n k / rate(least of m, n, k) and its bytes / B
    scores and their values     flops / rate(head width); backward 2.5 times that (Dao, 2022: five products for two)
    everything elementwise      touches x (bytes that a layer keeps) / B, two fifths of it forward
    products in another dtype   five bytes more for each element that is cast: found the largest, read again, written

with the device's rate for a size and B its memory's bandwidth. A gradient of a product takes as long as the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from tllm.planner.cluster.device import Device, Execution
from tllm.planner.cost.activations import layer_bytes, logits_bytes
from tllm.planner.cost.flops import BACKWARD, attention_flops, layer_flops, logits_flops
from tllm.planner.cost.rank_work import RankWork, TrainingFacts
from tllm.planner.cost.stage_team import OPERATIONS
from tllm.spec.cut import Cut, size
from tllm.spec.model_spec import LayerSpec, ModelSpec
from tllm.spec.plan import Plan

ATTENTION_BACKWARD = 2.5
FORWARD_TOUCHES = 2 / 5
CAST_BYTES = 5


class PassSeconds(NamedTuple):
    """Seconds of one microbatch through one run of layers. `recompute`: what its backward pass works out once more.

    Parts of these: `attention`, of `forward` its core; `memory`, of all four what is elementwise.
    """

    forward: float
    backward_input: float
    backward_weight: float
    recompute: float
    attention: float
    memory: float

    @property
    def whole(self) -> float:
        return self.forward + self.backward_input + self.backward_weight + self.recompute


class ComputeTime(Protocol):
    """How fast a rank is."""

    def pass_seconds(self, run: range) -> PassSeconds: ...


class ConstantRate:
    """All products at the same flop/s, and nothing else takes time."""

    def __init__(self, spec: ModelSpec, plan: Plan, facts: TrainingFacts, work: RankWork, flops: float) -> None:
        self.spec, self.plan, self.facts, self.work, self.flops = spec, plan, facts, work, flops

    def pass_seconds(self, run: range) -> PassSeconds:
        spec, cut, batch = self.spec, self.work.cut, self.work.batch
        share = batch.tokens / sum(self.facts.lengths) / self.flops
        layers = [spec.layers[number] for number in run]
        whole = share * sum(layer_flops(spec, layer, cut, self.facts.lengths) for layer in layers)
        core = share * sum(attention_flops(spec, layer, cut, self.facts.lengths) for layer in layers)
        again = {"none": 0.0, "selective": core, "layer": whole}[self.plan.recompute]
        end = logits_flops(spec, cut, batch.target_tokens) / self.flops if run.stop == spec.num_layers else 0
        forward = whole + end
        return PassSeconds(forward, (BACKWARD - 1) * forward, forward, again, core, 0.0)


class MatrixProduct(NamedTuple):
    """`copies` products [rows, inner] x [inner, columns]."""

    rows: float
    inner: int
    columns: int
    copies: float = 1

    @property
    def flops(self) -> float:
        return 2 * self.copies * self.rows * self.inner * self.columns

    @property
    def smallest(self) -> float:
        return min(self.rows, self.inner, self.columns)


class LayerTimeModel:
    """A rank on a device. `products`: the dtype of linear layers' products, where it is not that of the job."""

    def __init__(
        self,
        spec: ModelSpec,
        plan: Plan,
        facts: TrainingFacts,
        work: RankWork,
        device: Device,
        execution: Execution,
        products: str | None = None,
    ) -> None:
        self.spec, self.plan, self.facts, self.work = spec, plan, facts, work
        self.device, self.execution = device, execution
        self.products = products or facts.dtype
        self.known: dict[LayerSpec, PassSeconds] = {}

    def pass_seconds(self, run: range) -> PassSeconds:
        found = [self._layer(self.spec.layers[number]) for number in run]
        if run.stop == self.spec.num_layers:
            found.append(self._end())
        return PassSeconds(*map(sum, zip(*found, strict=True)))

    def _layer(self, layer: LayerSpec) -> PassSeconds:
        if layer not in self.known:
            self.known[layer] = self._layer_passes(layer)
        return self.known[layer]

    def _layer_passes(self, layer: LayerSpec) -> PassSeconds:
        spec, work, device = self.spec, self.work, self.device
        linear = list(_products(spec, layer, work.cut, work.batch.tokens, self.plan.ep))
        products = sum(self._seconds(one, self.products) for one in linear)
        flops = attention_flops(spec, layer, work.cut, self.facts.lengths)
        rate = self.execution.attention * device.matrix_rate(self.facts.dtype, spec.head_dim)
        core = flops * work.batch.tokens / sum(self.facts.lengths) / rate
        moved = self._touched(layer_bytes(spec, layer, work.cut, work.batch))
        into, out = self._casts(linear)
        starts = OPERATIONS * device.operation_seconds
        early, late = FORWARD_TOUCHES * moved + into + starts, (1 - FORWARD_TOUCHES) * moved + out + starts
        forward = products + core + early
        again = self._again(forward, core)
        memory = early + late + early * max(0.0, again - core * (self.plan.recompute == "selective")) / forward
        return PassSeconds(forward, products + ATTENTION_BACKWARD * core + late, products, again, core, memory)

    def _again(self, forward: float, core: float) -> float:
        if self.execution.recompute_share is not None:
            return self.execution.recompute_share * forward
        return {"none": 0.0, "selective": core, "layer": forward}[self.plan.recompute]

    def _end(self) -> PassSeconds:
        """Logits and loss, in the job's dtype."""
        batch, cut = self.work.batch, self.work.cut
        product = self._seconds(
            MatrixProduct(batch.target_tokens, self.spec.hidden_size, size(cut.vocab)), self.facts.dtype
        )
        moved = self._touched(logits_bytes(self.spec, cut, batch))
        forward = product + FORWARD_TOUCHES * moved
        return PassSeconds(forward, product + (1 - FORWARD_TOUCHES) * moved, product, 0.0, 0.0, moved)

    def _seconds(self, one: MatrixProduct, dtype: str) -> float:
        item = self.facts.item_bytes
        moved = item * one.copies * (one.rows * (one.inner + one.columns) + one.inner * one.columns)
        return max(one.flops / self.device.matrix_rate(dtype, one.smallest), moved / self.device.memory_bandwidth)

    def _touched(self, kept: float) -> float:
        return self.execution.touches * kept / self.device.memory_bandwidth

    def _casts(self, linear: Sequence[MatrixProduct]) -> tuple[float, float]:
        """Of what goes into products forward, and of what comes back into their gradients."""
        if self.products == self.facts.dtype:
            return 0.0, 0.0
        into = sum(one.copies * one.rows * one.inner for one in linear)
        back = sum(one.copies * one.rows * one.columns for one in linear)
        return CAST_BYTES * into / self.device.memory_bandwidth, CAST_BYTES * back / self.device.memory_bandwidth


def _products(spec: ModelSpec, layer: LayerSpec, cut: Cut, tokens: int, ep: int) -> Iterator[MatrixProduct]:
    """Of the linear layers of one layer, forward: qkv, what attention gives, gate and up, down."""
    D, H, moe = spec.hidden_size, spec.head_dim, layer.moe
    yield MatrixProduct(tokens, D, (size(cut.heads) + 2 * size(cut.kv_heads)) * H)
    yield MatrixProduct(tokens, size(cut.heads) * H, D)
    if moe is None:
        yield from _mlp(tokens, D, size(cut.width))
        return
    yield MatrixProduct(tokens, D, moe.num_experts)
    rows = tokens * ep * moe.top_k / moe.num_experts
    for one in _mlp(rows, D, size(cut.expert_width)):
        yield one._replace(copies=size(cut.experts) / ep)
    if moe.shared_width:
        yield from _mlp(tokens, D, size(cut.shared_width))


def _mlp(rows: float, width: int, inner: int) -> Iterator[MatrixProduct]:
    yield MatrixProduct(rows, width, 2 * inner)
    yield MatrixProduct(rows, inner, width)
