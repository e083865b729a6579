"""`StageTeam`: the devices that hold one stage together when serving: the seconds that a batch takes on them, by a
roofline model, and the bytes that they must hold.

A rank computes one layer in the longer of flops / rate and bytes / memory bandwidth, once for the products with its
weights and once for attention with its keys and values, plus the start of `OPERATIONS` operations. The ranks then
all-reduce (`message_time`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tllm.planner.cluster.device import Cluster
from tllm.planner.cost.cache_room import PAGE_SIZE, RUNTIME_BYTES, batch_tokens, context_of, working_bytes
from tllm.planner.cost.draft_bytes import draft_bytes
from tllm.planner.cost.flops import attention_flops, attention_matrices, layer_flops, logits_flops
from tllm.planner.cost.message_time import (
    TimeBreakdown,
    all_reduce_time,
    compute_and_all_reduce_time,
    transfer_after_compute,
    transfer_time,
)
from tllm.planner.cost.rank_bytes import RankBytes, cached_layers, end_bytes, kv_bytes, layer_bytes, state_elements
from tllm.planner.cost.serving_load import ExpectedBatch, ServingFacts
from tllm.planner.cost.weight_bits import mean_linear_bytes, saved_table_bytes
from tllm.spec.cut import Cut, as_layer, cut_stage, size
from tllm.spec.model_spec import DeltaSpec, LayerSpec, ModelSpec, MoeSpec
from tllm.spec.plan import Plan, Stage

OPERATIONS = 40
"""About how many operations one layer has in a forward pass besides its products: norms, rotations, copies,
attention."""

TOKEN_ID = 8
"""Bytes of a token's id."""

Kind = tuple[int | None, MoeSpec | None, DeltaSpec | None, bool]
"""(window, experts, gated delta net, whether it shares keys): layers of one kind cost the same."""


@dataclass(frozen=True)
class ServingMemory:
    """One rank's bytes when serving."""

    weights: float
    cache: int
    working: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.working + self.runtime


class StageTeam:
    """The devices of one stage, each with one of the `cuts` of the model, and what a batch takes on them."""

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        devices: Sequence[int],
        cuts: tuple[Cut, ...],
        facts: ServingFacts,
    ) -> None:
        self.spec, self.cluster, self.devices = spec, cluster, tuple(devices)
        self.facts = facts
        self.cuts = cuts
        self._each = [cluster.devices[device] for device in devices]
        link = cluster.slowest_link(self.devices)
        self.link = link.with_sync_overhead(link.layer_sync_overhead)
        self._layers: dict[tuple[Kind, ExpectedBatch], TimeBreakdown] = {}
        self._sizes: dict[tuple[Kind | int, int], float] = {}
        # The bits that are asked for count for every weight, whatever the model's files have.
        held = spec if facts.weight_bits is None else replace(spec, quantization=None)
        self._held = [held] * len(cuts)

    def batch_time(self, layers: range, batch: ExpectedBatch) -> TimeBreakdown:
        """A batch through these layers, and through the model's ends if its first or last layer is among them."""
        time = self.ends_time(layers.start == 0, layers.stop == self.spec.num_layers, batch)
        for number in layers:
            time = time.plus(self.layer_time(self.spec.layers[number], batch))
        return time

    def layer_time(self, layer: LayerSpec, batch: ExpectedBatch) -> TimeBreakdown:
        """A batch through one layer: what its ranks compute, and its all-reduces."""
        key = (kind_of(layer), batch)
        if key not in self._layers:
            works = [self._work(layer, batch, place) for place in range(len(self.cuts))]
            self._layers[key] = compute_and_all_reduce_time(
                works, self._all_reduces(layer, batch), self._overhead(layer, batch)
            )
        return self._layers[key]

    def ends_time(self, first: bool, last: bool, batch: ExpectedBatch) -> TimeBreakdown:
        """What a stage takes on top of its layers, by whether it has the model's `first` and `last` layer.

        Every stage begins a step. The first stage all-reduces the embedding; the last computes logits, for as long as
        its slowest rank does, and exchanges the likeliest tokens. A draft model drafts before the
        first stage begins.
        """
        ranks, D = len(self.cuts), self.spec.hidden_size
        time = self._begin(first, batch).plus(TimeBreakdown(operations=self._cold(batch)))
        if first:
            time = time.plus(self._drafting(batch))
        time = time.plus(self._end_sums(first, last, batch))
        if last:
            works = []
            for device, cut, held in zip(self._each, self.cuts, self._held, strict=True):
                item = self.facts.weight_bytes
                table = size(cut.vocab) * held.hidden_size * item - saved_table_bytes(held, cut, item, head=True)
                flops = logits_flops(held, cut, 1) * batch.rows
                if not self.spec.writes:  # a head of its own, and small, or none
                    table, flops = self.spec.num_labels * D * item, 2 * self.spec.num_labels * D * batch.rows
                works.append(
                    _slower(flops / device.logits_rate(self.facts.dtype, batch.rows), table / device.memory_bandwidth)
                )
            time = time.plus(max(works, key=lambda work: work.seconds))
            time = time.plus(transfer_time(TOKEN_ID * batch.rows, self.link)) if ranks > 1 else time
        return time

    def _end_sums(self, first: bool, last: bool, batch: ExpectedBatch) -> TimeBreakdown:
        """The all-reduces outside of layers: that of the embedding."""
        if not first:
            return TimeBreakdown()
        nbytes = batch.tokens * self.spec.hidden_size * self.facts.message_bytes
        return all_reduce_time(len(self.cuts), nbytes, self.link)

    def _begin(self, first: bool, batch: ExpectedBatch) -> TimeBreakdown:
        """Until all ranks have the batch: its leader sends it to the others.

        On the `first` stage the leader is the driver, which schedules the batch before and is not a follower itself.
        """
        leader, *others = self._each
        driver, followers = (leader.driver_step(batch.sequences), others) if first else (0.0, [leader, *others])
        following = max((device.follower_step(batch.sequences) for device in followers), default=0.0)
        time = TimeBreakdown(operations=driver + following)
        if not others:
            return time
        hidden = 0.0 if first else batch.tokens * self.spec.widest_hop * self.facts.message_bytes
        return time.plus(transfer_after_compute(len(others) * hidden, self.link))

    def _drafting(self, batch: ExpectedBatch) -> TimeBreakdown:
        """The steps of the draft model on the first rank's device, each with a token of every sequence."""
        drafts = self.facts.draft_model
        if drafts is None or not batch.draft_steps:
            return TimeBreakdown()
        facts = replace(self.facts, draft_model=None, weight_bits=None)
        team = StageTeam(drafts, self.cluster, self.devices[:1], cut_stage(drafts, (1,)), facts)
        step = ExpectedBatch(batch.sequences, batch.sequences, batch.keys, batch.sequences)
        return team.batch_time(range(drafts.num_layers), step).times(batch.draft_steps)

    def _cold(self, batch: ExpectedBatch) -> float:
        """Seconds by which a stage's layers take longer than repeated alone, because caches are cold: after a wait, or
        after the rest of a step. Where several ranks all-reduce, this is part of the synchronization overhead."""
        if batch.after_idle:
            return max(device.after_wait_seconds for device in self._each)
        return self._each[0].cold_cache_seconds if len(self.devices) == 1 else 0.0

    def memory(self, layers: range) -> list[ServingMemory]:
        """The memory of each rank that holds these layers."""
        return [self._memory(layers, place) for place in range(len(self.cuts))]

    def fits(self, layers: range, end: bool = True) -> bool:
        """Whether each rank has room; without `end`, room for the layers but not for the logits after them."""
        memory = [self._memory(layers, place, end) for place in range(len(self.cuts))]
        return all(rank.total <= device.memory for rank, device in zip(memory, self._each, strict=True))

    def _work(self, layer: LayerSpec, batch: ExpectedBatch, place: int) -> TimeBreakdown:
        """What one rank computes of one layer: products with weights, attention over keys and values, operations."""
        spec, cut, facts = self._held[place], self.cuts[place], self.facts
        device = self._each[place]
        keys = 1 if layer.delta else batch.keys
        if layer.window is not None:  # as many each way
            keys = min(keys, 2 * layer.window - 1 if spec.bidirectional else layer.window)
        rate = device.matrix_rate(facts.dtype, batch.tokens)
        products = (layer_flops(spec, layer, cut, (1,)) - attention_flops(spec, layer, cut, (1,))) * batch.tokens
        weights = read_elements(spec, layer, cut, batch.tokens) * mean_linear_bytes(spec, facts.weight_bytes)
        scores = attention_flops(spec, layer, cut, (1,)) * keys * batch.tokens
        if layer.delta:  # states are read and written
            cache = 2 * state_elements(layer.delta, cut) * max(4, facts.item_bytes) * batch.sequences
        else:
            cache = kv_bytes(spec, layer, cut, facts.item_bytes, facts.kv_cache_dtype) * keys * batch.sequences
        time = _slower(products / rate, weights / device.memory_bandwidth).plus(
            _slower(scores / rate, cache / device.cache_bandwidth)
        )
        return time.plus(TimeBreakdown(operations=OPERATIONS * device.operation_seconds))

    def _overhead(self, layer: LayerSpec, batch: ExpectedBatch) -> float:
        """Seconds of a layer's all-reduces that remain even where all messages have arrived early."""
        rows = layer.hidden_sums * batch.tokens
        sent = (len(self.cuts) - 1) * rows * self.spec.hidden_size * self.facts.message_bytes
        return all_reduces_per_layer(self.spec) * self.link.sync_overhead + sent * self.link.compute_overhead

    def _all_reduces(self, layer: LayerSpec, batch: ExpectedBatch) -> TimeBreakdown:
        """The messages of one layer: two all-reduces of hidden states, and of norms over all heads two small ones."""
        ranks, nbytes = len(self.cuts), batch.tokens * self.spec.hidden_size * self.facts.message_bytes
        time = all_reduce_time(ranks, nbytes, self.link)
        time = time.plus(all_reduce_time(ranks, (layer.hidden_sums - 1) * nbytes, self.link))
        if self.spec.qk_norm == "full":
            time = time.plus(all_reduce_time(ranks, batch.tokens * 4, self.link).times(2))
        return time

    def _memory(self, layers: range, place: int, end: bool = True) -> ServingMemory:
        spec, facts, cut = self.spec, self.facts, self.cuts[place]
        first, last = end_bytes(self._held[place], layers, cut, facts.weight_bytes)
        weights = sum(self._layer_bytes(number, place) for number in layers) + first + (last if end else 0)
        kinds = Counter(spec.layers[number] for number in cached_layers(spec, layers))
        per_token = sum(
            count * kv_bytes(spec, layer, cut, facts.item_bytes, facts.kv_cache_dtype) for layer, count in kinds.items()
        )
        drafts, cache = facts.draft_model if place == layers.start == 0 else None, 0
        if drafts is not None:
            held = draft_bytes(drafts, facts.dtype, facts.cached_tokens // PAGE_SIZE, PAGE_SIZE)
            weights, cache = weights + held.weights, held.cache
        rank = RankBytes(0, 0, layers, cut, 0, per_token)
        longest, most = context_of(spec, facts.max_model_len), facts.max_num_seqs
        tokens = min(batch_tokens(spec, longest), facts.cached_tokens if most is None else longest * most)
        rows = (facts.concurrency if most is None else most) * (1 + facts.num_speculative_tokens)
        working = working_bytes(spec, rank, facts.dtype, tokens, rows)
        return ServingMemory(weights, per_token * facts.cached_tokens + cache, working)

    def _layer_bytes(self, number: int, place: int) -> float:
        # Layers of one kind may still be in other bits.
        held = self._held[place]
        key = (kind_of(self.spec.layers[number]) if held.quantization is None else number, place)
        if key not in self._sizes:
            self._sizes[key] = layer_bytes(held, number, self.cuts[place], self.facts.weight_bytes)
        return self._sizes[key]


def all_reduces_per_layer(spec: ModelSpec) -> int:
    """All-reduces of one layer: two, and one more each for a norm over all heads' queries and keys."""
    return 4 if spec.qk_norm == "full" else 2


def kind_of(layer: LayerSpec) -> Kind:
    """What a layer's cost depends on."""
    return layer.window, layer.moe, layer.delta, layer.shares_keys


def whole_model(spec: ModelSpec) -> Plan:
    """The plan of one device that has all of a model."""
    return Plan((Stage(0, spec.num_layers),))


def _slower(compute: float, memory: float) -> TimeBreakdown:
    """Memory is read while products are computed: the slower of both counts (roofline)."""
    return TimeBreakdown(compute=compute) if compute >= memory else TimeBreakdown(memory=memory)


def read_elements(spec: ModelSpec, layer: LayerSpec, cut: Cut, tokens: float) -> float:
    """Expected elements of a layer's weights that a batch reads. Of the experts it reads those that some token chose:
    with k of E experts chosen at random by each of T tokens, the share 1 - (1 - k / E)^T."""
    D, attention = spec.hidden_size, sum(matrix.elements for matrix in attention_matrices(spec, layer, cut))
    attention += 3 * D * spec.per_layer_width
    if layer.moe is None:
        _, of_layer = as_layer(spec, layer, cut)
        return attention + (1 + spec.into_mlp) * D * size(of_layer.width)
    chosen = 1 - math.pow(1 - layer.moe.top_k / layer.moe.num_experts, tokens)
    experts = 3 * D * size(cut.expert_width) * size(cut.experts) * chosen
    return attention + experts + 3 * D * size(cut.shared_width) + D * layer.moe.num_experts
