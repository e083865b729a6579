"""How fast this process serves a model's layers and its logits: what the time of a token is predicted from."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from tllm.comm.collectives.group import Group, solo
from tllm.comm.links.link import LocalLink
from tllm.core.timing import mean_seconds_each
from tllm.engine.compute.kv_cache import KVCache
from tllm.engine.compute.paged_attention import PagedAttend
from tllm.engine.driver import Deliver, Driver
from tllm.engine.measure.step_speed import TOKENS, TimedStep, take_part, token_of_each
from tllm.engine.schedule.batch import PLAIN, Batch, Entry, encode
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage, RingLinks, lengths, positions
from tllm.model.attention import Attend
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh
from tllm.planner.cost.cache_room import PAGE_SIZE
from tllm.planner.cost.rank_bytes import end_parameters, layer_parameters
from tllm.planner.measured.survey import SurveyedPass
from tllm.spec.cut import Cut, cut_stage
from tllm.spec.model_spec import ModelSpec

STREAMED_BYTES = 64 * 2**20
"""Weights that a pass goes through, if the model has so many: more than caches hold, as in a whole model."""

REST = 0.01
"""Seconds, about, for which a stage waits until a batch comes round a ring with few others."""

FEW_RESTS = 5

FILLED = 0.01

LEAST = 1e-6
"""Seconds, where noise would make it none."""

Passes = tuple[SurveyedPass, ...]
Work = Callable[[], object]


class ServingPasses(NamedTuple):
    """Of a layer, of the logits; what a driver's step takes beside them, tokens handed out, and what a stage does that
    follows. By how many seconds layers take longer, as caches are cold: in a step `cooled`, after a wait `rest`;
    `rested`: seconds of all waits."""

    layers: Passes
    logits: Passes
    turns: Passes
    follows: Passes
    cooled: float
    rest: float
    rested: float


@torch.inference_mode()
def serving_passes(
    spec: ModelSpec,
    dtype: torch.dtype,
    sequences: tuple[int, ...],
    prompt: int,
    chunk: int,
    seconds: float,
    deliver: Deliver = lambda outputs: None,
) -> ServingPasses:
    """What this process takes to serve, measured in about so many seconds.

    `sequences`: how many have a token each, after a prompt; `chunk`: tokens of a prompt that go through at once;
    `deliver` is given what a driver makes. What is measured is measured by turns: what slows this machine for a while
    slows all of it.
    """
    batches = [batch_of(count, 1, prompt) for count in sequences] + [batch_of(1, chunk, 0)]
    held = [HeldLayers(spec, dtype, ranks) for ranks in ((1, 2) if spec.num_heads > 1 else (1,))]
    through = [(one, batch) for one in held for batch in batches]
    works = [one.through(batches, batch) for one, batch in through]
    heads = _heads(spec, dtype)
    works += [_through_logits(heads, count) for count in sequences]
    turns = [held[0].turn(count, prompt, deliver) for count in sequences]
    follows = [held[0].follow(count, prompt) for count in sequences]
    rested = _Rested(works[0])
    taken = iter(mean_seconds_each([*works, *turns, *follows, rested], seconds))
    layers = tuple(_passed(one, batch, next(taken)) for one, batch in through)
    logits = tuple(SurveyedPass(count, count, 1, next(taken)) for count in sequences)

    def beside(steps: list[TimedStep]) -> Passes:
        return tuple(
            SurveyedPass(count, 1, 1, max(step.beside, LEAST), prompt)
            for count, step in zip(sequences, steps, strict=True)
        )

    cooled = max(0.0, turns[0].layers - held[0].layers * layers[0].seconds)
    return ServingPasses(layers, logits, beside(turns), beside(follows), cooled, rested.longer, rested.seconds)


class HeldLayers:
    """What one of `ranks` equal ranks has of some layers: alone with them, or with the others of `tp`."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, ranks: int, tp: Group | None = None) -> None:
        self.spec, self.dtype, self.ranks = spec, dtype, ranks
        tp = tp or solo()
        self.layers, cut = layers_held(spec, dtype, ranks), cut_stage(spec, (1,) * ranks)[tp.rank]
        mesh = Mesh(1, 3, range(1, 1 + self.layers), tp, cut)
        self.model = build(inside(spec, self.layers), mesh, dtype)
        _fill(self.model)

    def through(self, batches: list[Batch], batch: Batch) -> Work:
        """A pass of a batch, with a cache that has room for each of them."""
        cache = KVCache(self.model.attention_specs(), self.model.kv_shape, _limits(self.spec, batches), self.dtype)
        x_TD = torch.ones(len(batch.token_ids), self.spec.hidden_size, dtype=self.dtype)
        return partial(_forward, self.model, cache, batch, x_TD)

    def turn(self, count: int, prompt: int, deliver: Deliver) -> TimedStep:
        """A driver's step with a token of each of so many sequences, through a model without ends."""
        stage = self.stage(count, prompt, None)
        return TimedStep(stage, partial(token_of_each, Driver(stage, Scheduler(stage.limits)), count, prompt, deliver))

    def follow(self, count: int, prompt: int) -> TimedStep:
        """The same of the last stage: what comes to it and what it gives passes links inside this process."""
        ring = RingLinks(LocalLink(0, 1), LocalLink(1, 0))
        batch = batch_of(count, 1, prompt)
        entries = tuple(msgspec.structs.replace(entry, sampling=PLAIN) for entry in batch.entries)
        payload = encode(msgspec.structs.replace(batch, entries=entries))
        x_TD = torch.ones(count, self.spec.hidden_size, dtype=self.dtype)
        stage = self.stage(count, prompt, ring, first=False)
        return TimedStep(stage, partial(take_part, stage, ring, payload, x_TD))

    def stage(
        self, count: int, prompt: int, ring: RingLinks | None, first: bool = True, last: bool = True
    ) -> PipelineStage:
        """With room for a reply to each of so many prompts; the ends of a model that it has take no time."""
        longest = prompt + TOKENS
        limits = Limits(
            num_pages=count * -(-longest // PAGE_SIZE),
            vocab_size=self.spec.vocab_size,
            max_model_len=longest,
            page_size=PAGE_SIZE,
        )
        cache = KVCache(self.model.attention_specs(), self.model.kv_shape, limits, self.dtype)
        middle = _Middle(self.model, first, last, limits.max_num_batched_tokens, self.dtype)
        return PipelineStage(middle, cache, solo(), ring, limits, self.spec.hidden_size, [(0, self.spec.vocab_size)])


def _passed(held: HeldLayers, batch: Batch, seconds: float) -> SurveyedPass:
    first = batch.entries[0]
    return SurveyedPass(len(batch.token_ids), first.count, held.ranks, seconds / held.layers, first.start)


def _forward(model: Transformer, cache: KVCache, batch: Batch, x_TD: Tensor) -> Tensor:
    out_TD: Tensor = model(x_TD, positions(batch), PagedAttend(cache, batch.entries), lengths(batch))
    return out_TD


def _heads(spec: ModelSpec, dtype: torch.dtype) -> list[Transformer]:
    """The model's end several times. One alone would stay in a cache in which the layers before it leave nothing."""
    last, cut = spec.num_layers, cut_stage(spec, (1,))[0]
    elements = sum(one.elements for one in end_parameters(spec, range(last, last), cut)[1])
    between = layers_held(spec, dtype, 1) * _largest(spec, cut)
    heads = [build(spec, Mesh(2, 3, range(last, last), solo(), cut), dtype) for _ in range(1 + between // elements)]
    for head in heads:
        _fill(head)
    return heads


def _through_logits(heads: list[Transformer], rows: int) -> Work:
    """Logits of so many rows, and the choice of the likeliest."""
    first, turns = next(heads[0].parameters()), cycle(heads)
    x_TD = torch.ones(rows, heads[0].spec.hidden_size, dtype=first.dtype)
    return lambda: next(turns).logits(x_TD).argmax(-1)


class _Middle:
    """Layers as a whole model, or as its first or last stage; its ends take no time."""

    def __init__(self, model: Transformer, is_first: bool, is_last: bool, rows: int, dtype: torch.dtype) -> None:
        self.model, self.is_first, self.is_last = model, is_first, is_last
        self.hidden_TD = torch.ones(rows, model.spec.hidden_size, dtype=dtype)
        self.logits_TV = torch.zeros(rows, model.spec.vocab_size)

    def __call__(self, x: Tensor, positions_T: Tensor, attend: Attend, lengths_T: Tensor | None = None) -> Tensor:
        out_TD: Tensor = self.model(self.hidden_TD[: len(x)], positions_T, attend, lengths_T)
        return out_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        return self.logits_TV[: len(x_TD)]


class _Rested:
    """Work after a rest, and at once again: by how many seconds the first takes `longer`, in the middle of all pairs.

    Of means of other moments the difference would be what a machine's speed has changed by meanwhile.
    """

    def __init__(self, work: Work) -> None:
        self.work, self.seconds, self._found = work, 0.0, list[float]()

    @property
    def longer(self) -> float:
        while len(self._found) < FEW_RESTS:
            self()
        return max(0.0, statistics.median(self._found))

    def __call__(self) -> None:
        time.sleep(REST)  # as a stage sleeps until its batch comes: what others do meanwhile cools its caches
        self.seconds += REST
        begun = time.perf_counter()
        self.work()
        cold = time.perf_counter()
        self.work()
        self._found.append((cold - begun) - (time.perf_counter() - cold))


def layers_held(spec: ModelSpec, dtype: torch.dtype, ranks: int) -> int:
    """How many layers `STREAMED_BYTES` take, of those that the model has."""
    largest = _largest(spec, cut_stage(spec, (1,) * ranks)[0])
    return min(spec.num_layers, max(1, STREAMED_BYTES // (largest * dtype.itemsize)))


def _largest(spec: ModelSpec, cut: Cut) -> int:
    """Elements of the largest layer."""
    return max(sum(one.elements for one in layer_parameters(spec, layer, cut)) for layer in spec.layers)


def inside(spec: ModelSpec, count: int) -> ModelSpec:
    """The model with layers 1 to `count` that are its first ones, and one more at each end."""
    return dataclasses.replace(spec, layers=(spec.layers[0], *spec.layers[:count], spec.layers[-1]))


def batch_of(sequences: int, count: int, start: int) -> Batch:
    """So many tokens of each of some sequences, from one place on."""
    pages = -(-(start + count) // PAGE_SIZE)
    entries = tuple(Entry(i, start, count, start + count, ((i * pages, pages),)) for i in range(sequences))
    return Batch(0, entries, (0,) * (sequences * count))


def _limits(spec: ModelSpec, batches: list[Batch]) -> Limits:
    pages = max(first + count for batch in batches for entry in batch.entries for first, count in entry.table)
    return Limits(num_pages=pages, vocab_size=spec.vocab_size, max_model_len=spec.max_model_len, page_size=PAGE_SIZE)


def _fill(model: nn.Module) -> None:
    """Numbers of ordinary size: what is denormal takes another time."""
    for parameter in model.parameters():
        parameter.fill_(FILLED)
