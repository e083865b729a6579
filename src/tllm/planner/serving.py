"""What serving takes under a plan on given devices: time to first token, milliseconds per token, memory, bytes sent.

`concurrency` requests come at once, each with a prompt, and each is given a reply. A stage computes a batch in the time
of its products, of reading its weights once and its keys and values, and of two sums in each layer over its ranks.
As many batches are in flight as there are stages, so a turn round the ring takes

    max(sum over stages of (batch + hop), batches x the slowest stage or wire)

Prompts go round in chunks, as `engine.scheduler` cuts them, which follow one another through the stages.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tllm.ground.errors import PlanError
from tllm.planner.cluster import Cluster, Device, worst
from tllm.planner.cost import ITEM_BYTES, RankBytes
from tllm.planner.flops import attention_flops, layer_flops, logits_flops
from tllm.planner.parameters import end_parameters, layer_parameters, size
from tllm.planner.room import MAX_NUM_BATCHED_TOKENS, PAGE_SIZE, RUNTIME_BYTES, working_bytes
from tllm.planner.sums import Parts, one_way, sum_over
from tllm.spec.axes import source
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model import LayerSpec, ModelSpec, MoeSpec
from tllm.spec.plan import Experts, Plan, Stage

SMALLEST_CHUNK = 128
"""Tokens of a prompt in a batch at the least, with several stages."""

OPERATIONS = 40
"""Operations of one layer in a forward pass beside its products, about: norms, rotations, copies, attention."""

TOKEN_ID = 8

Kind = tuple[int | None, MoeSpec | None]


@dataclass(frozen=True)
class ServingFacts:
    """What is asked: requests of `prompt` tokens that get `reply` tokens, `concurrency` at once.

    `weight_bits`: of one weight, where they are kept in fewer bits than `dtype` has.
    """

    dtype: str
    prompt: int = 512
    reply: int = 128
    concurrency: int = 1
    weight_bits: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise PlanError(f"dtype {self.dtype!r} is not known", "known: " + ", ".join(ITEM_BYTES))
        for name in ("prompt", "reply", "concurrency"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", f"give {name} of 1 or more")

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def weight(self) -> float:
        """Bytes of a weight."""
        return self.item if self.weight_bits is None else self.weight_bits / 8

    @property
    def cached(self) -> int:
        """Tokens whose keys and values are kept at the most, in whole pages."""
        return self.concurrency * -(-(self.prompt + self.reply) // PAGE_SIZE) * PAGE_SIZE


@dataclass(frozen=True)
class Batch:
    """`tokens` of `sequences`, of which each sees `keys` on an average; `rows` of them get logits."""

    tokens: float
    sequences: float
    keys: float
    rows: float


@dataclass(frozen=True)
class Load:
    """What goes round a ring of `stages`: `chunks` batches of prompts, then for each token `batches` in flight."""

    stages: int
    facts: ServingFacts

    @cached_property
    def batches(self) -> int:
        return min(self.stages, self.facts.concurrency)

    @cached_property
    def chunks(self) -> int:
        tokens = self.facts.concurrency * self.facts.prompt
        most = MAX_NUM_BATCHED_TOKENS
        if self.stages > 1:
            most = min(most, max(SMALLEST_CHUNK, -(-tokens // (2 * self.stages))))
        return -(-tokens // most)

    @cached_property
    def prefill(self) -> Batch:
        tokens = self.facts.concurrency * self.facts.prompt / self.chunks
        sequences = max(1.0, tokens / self.facts.prompt)
        return Batch(tokens, sequences, (self.facts.prompt + 1) / 2, sequences)

    @cached_property
    def decode(self) -> Batch:
        sequences = -(-self.facts.concurrency // self.batches)
        return Batch(sequences, sequences, self.facts.prompt + self.facts.reply / 2, sequences)

    def first(self, total: float, slowest: float, request: float | None = None) -> float:
        """Seconds until prompts are computed: all, or those of so many requests. `total`: one chunk through the ring;
        `slowest`: on the stage or wire that takes longest."""
        share = 1.0 if request is None else request / self.facts.concurrency
        return total + max(0.0, share * self.chunks - 1) * max(slowest, total / self.stages)

    def turn(self, total: float, slowest: float) -> float:
        """Seconds from one token of a request to its next."""
        return max(total, self.batches * slowest)

    def seconds(self, prefill: tuple[float, float], decode: tuple[float, float]) -> float:
        """Until all requests have their replies; each (total, slowest)."""
        return self.first(*prefill) + (self.facts.reply - 1) * self.turn(*decode)


@dataclass(frozen=True)
class StageCost:
    """One stage: its two kinds of batch, and the hop that follows (of the last stage: token ids to the first)."""

    prefill: Parts
    decode: Parts
    prefill_hop: Parts
    decode_hop: Parts


@dataclass(frozen=True)
class ServingMemory:
    """One rank's bytes."""

    weights: float
    cache: int
    working: int
    runtime: int = RUNTIME_BYTES

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.working + self.runtime


@dataclass(frozen=True)
class ServingPrediction:
    """`seconds`: of all requests, from their coming at once to the last token; the others per request.

    `first_token`: on an average over the requests; `per_token`: of the tokens that follow it.
    """

    seconds: float
    first_token: float
    per_token: float
    tokens_per_second: float
    load: Load
    stages: tuple[StageCost, ...]
    memory: tuple[ServingMemory, ...]

    @property
    def bubble(self) -> float:
        """The share of the stages' time in which they compute nothing, while replies are made."""
        busy = sum(self.load.batches * stage.decode.seconds for stage in self.stages)
        return max(0.0, 1 - busy / (len(self.stages) * self.per_token)) if self.per_token else 0.0


def predict_serving(
    spec: ModelSpec, plan: Plan, cluster: Cluster, devices: Sequence[int], facts: ServingFacts
) -> ServingPrediction:
    """`devices[rank]` is where a rank runs. PlanError where the plan cannot be cut or has another number of ranks."""
    plan.check(spec.num_layers)
    plan.check_serving()
    if len(devices) != plan.world_size:
        raise PlanError(f"the plan has {plan.world_size} ranks and {len(devices)} devices are given")
    load = Load(plan.pp, facts)
    teams = [Team(spec, cluster, [devices[r] for r in plan.ranks(i)], plan, i, facts) for i in range(plan.pp)]
    stages = []
    for index, team in enumerate(teams):
        after = teams[(index + 1) % len(teams)]
        layers = plan.runs[index]
        prefill, decode = (team.run(layers, batch) for batch in (load.prefill, load.decode))
        ends, closes = (team.devices, after.devices), index + 1 == len(teams)
        hops = [hop(spec, cluster, facts.item, *ends, batch, closes) for batch in (load.prefill, load.decode)]
        stages.append(StageCost(prefill, decode, *hops))
    of_prefill, of_decode = (
        ring_of([(getattr(one, kind), getattr(one, f"{kind}_hop")) for one in stages]) for kind in ("prefill", "decode")
    )
    mean = (facts.concurrency + 1) / 2
    seconds = load.seconds(of_prefill, of_decode)
    return ServingPrediction(
        seconds,
        load.first(*of_prefill, mean),
        load.turn(*of_decode),
        facts.concurrency * facts.reply / seconds,
        load,
        tuple(stages),
        tuple(one for index, team in enumerate(teams) for one in team.memory(plan.runs[index])),
    )


def ring_of(stages: Sequence[tuple[Parts, Parts]]) -> tuple[float, float]:
    """(total, slowest) of a ring's (batch, hop), stage by stage."""
    total = sum(batch.seconds + hop.seconds for batch, hop in stages)
    return total, max(max(batch.seconds, hop.sending) for batch, hop in stages)


class Team:
    """The devices of one stage, their cut, and what a batch takes on them."""

    def __init__(
        self,
        spec: ModelSpec,
        cluster: Cluster,
        devices: Sequence[int],
        plan: Plan,
        stage: int,
        facts: ServingFacts,
    ) -> None:
        self.spec, self.cluster, self.devices = spec, cluster, tuple(devices)
        self.facts = facts
        self.cuts = cut_stage(spec, plan.stages[stage].shares, plan.experts)
        self.link = cluster.slowest(self.devices)
        self._layers: dict[tuple[Kind, Batch], Parts] = {}
        self._sizes: dict[tuple[Kind, int], int] = {}

    def run(self, layers: range, batch: Batch) -> Parts:
        """A batch through these layers and the model's ends, if they are among them."""
        found = self.ends(layers.start == 0, layers.stop == self.spec.num_layers, batch)
        for number in layers:
            found = found.plus(self.layer(self.spec.layers[number], batch))
        return found

    def layer(self, layer: LayerSpec, batch: Batch) -> Parts:
        """One layer: of its ranks the slowest, and two sums."""
        key = (kind_of(layer), batch)
        if key not in self._layers:
            works = [self._work(layer, batch, *each) for each in zip(self._each(), self.cuts, strict=True)]
            self._layers[key] = max(works, key=lambda one: one.seconds).plus(self._sums(batch))
        return self._layers[key]

    def ends(self, first: bool, last: bool, batch: Batch) -> Parts:
        """The embedding's sum over ranks; the logits, and the meeting of their likeliest."""
        ranks, D = len(self.cuts), self.spec.hidden_size
        found = sum_over(ranks, batch.tokens * D * self.facts.item, self.link) if first else Parts()
        if last:
            works = []
            for device, cut in zip(self._each(), self.cuts, strict=True):
                table = size(cut.vocab) * D * self.facts.weight
                flops = logits_flops(self.spec, cut, 1) * batch.rows
                works.append(_slower(flops / device.matrix_rate(self.facts.dtype, batch.rows), table / device.read))
            found = found.plus(max(works, key=lambda one: one.seconds))
            found = found.plus(one_way(TOKEN_ID * batch.rows, self.link)) if ranks > 1 else found
        return found

    def memory(self, layers: range) -> list[ServingMemory]:
        """Of each rank."""
        return [self._memory(layers, place) for place in range(len(self.cuts))]

    def fits(self, layers: range, end: bool = True) -> bool:
        """Whether each rank has room; without `end` for the layers and not for the model's end after them."""
        memory = [self._memory(layers, place, end) for place in range(len(self.cuts))]
        return all(one.total <= device.memory for one, device in zip(memory, self._each(), strict=True))

    def _each(self) -> list[Device]:
        return [self.cluster.devices[device] for device in self.devices]

    def _work(self, layer: LayerSpec, batch: Batch, device: Device, cut: Cut) -> Parts:
        """One rank's products, with its weights and with keys and values."""
        spec, facts = self.spec, self.facts
        keys = batch.keys if layer.window is None else min(batch.keys, layer.window)
        rate = device.matrix_rate(facts.dtype, batch.tokens)
        products = (layer_flops(spec, layer, cut, (1,)) - attention_flops(spec, layer, cut, (1,))) * batch.tokens
        weights = _read(spec, layer, cut, batch.tokens) * facts.weight
        scores = attention_flops(spec, layer, cut, (1,)) * keys * batch.tokens
        cache = 2 * size(cut.kv_heads) * spec.head_dim * facts.item * keys * batch.sequences
        found = _slower(products / rate, weights / device.read).plus(_slower(scores / rate, cache / device.read))
        return found.plus(Parts(operations=OPERATIONS * device.operation))

    def _sums(self, batch: Batch) -> Parts:
        ranks = len(self.cuts)
        found = sum_over(ranks, batch.tokens * self.spec.hidden_size * self.facts.item, self.link).times(2)
        if self.spec.qk_norm == "full":
            found = found.plus(sum_over(ranks, batch.tokens * 4, self.link).times(2))
        return found

    def _memory(self, layers: range, place: int, end: bool = True) -> ServingMemory:
        spec, facts, cut = self.spec, self.facts, self.cuts[place]
        elements = sum(self._elements(spec.layers[number], place) for number in layers)
        first, last = end_parameters(spec, layers, cut)
        elements += sum(one.elements for one in (first + last if end else first))
        per_token = 2 * len(layers) * size(cut.kv_heads) * spec.head_dim * facts.item
        rank = RankBytes(0, 0, layers, cut, 0, per_token)
        tokens = min(MAX_NUM_BATCHED_TOKENS, facts.cached)
        working = working_bytes(spec, rank, facts.dtype, tokens, facts.concurrency)
        return ServingMemory(elements * facts.weight, per_token * facts.cached, working)

    def _elements(self, layer: LayerSpec, place: int) -> int:
        key = (kind_of(layer), place)
        if key not in self._sizes:
            self._sizes[key] = sum(one.elements for one in layer_parameters(self.spec, layer, self.cuts[place]))
        return self._sizes[key]


def kind_of(layer: LayerSpec) -> Kind:
    """Layers of one kind cost the same."""
    return layer.window, layer.moe


def hop(
    spec: ModelSpec, cluster: Cluster, item: int, here: Sequence[int], there: Sequence[int], batch: Batch, closes: bool
) -> Parts:
    """From the devices of a stage to the next: each rank there takes the hidden state from one here.

    What `closes` the ring goes from the last stage to the first, and is token ids; a stage alone sends none.
    """
    if closes:
        if here == there:
            return Parts()
        return one_way(TOKEN_ID * batch.rows, cluster.link(here[0], there[0]))
    link = worst(cluster.link(here[source(place, len(here))], device) for place, device in enumerate(there))
    return one_way(-(-len(there) // len(here)) * batch.tokens * spec.hidden_size * item, link)


def bare(shares: tuple[int, ...], layers: int, experts: Experts) -> Plan:
    """A plan of one stage, for the cost of its team."""
    return Plan((Stage(0, layers, shares),), experts)


def _slower(compute: float, memory: float) -> Parts:
    """Memory is read while products are computed: the slower counts."""
    return Parts(compute=compute) if compute >= memory else Parts(memory=memory)


def _read(spec: ModelSpec, layer: LayerSpec, cut: Cut, tokens: float) -> float:
    """Elements of a layer's weights that a batch reads: of experts those that some token has chosen."""
    D, H = spec.hidden_size, spec.head_dim
    attention = D * H * (2 * size(cut.heads) + 2 * size(cut.kv_heads))
    if layer.moe is None:
        return attention + 3 * D * size(cut.width)
    chosen = 1 - math.pow(1 - layer.moe.top_k / layer.moe.num_experts, tokens)
    experts = 3 * D * size(cut.expert_width) * size(cut.experts) * chosen
    return attention + experts + 3 * D * size(cut.shared_width) + D * layer.moe.num_experts
