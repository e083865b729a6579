"""How fast a device serves a model's layers: the difference between steps of stages with one layer and with several.

A device computes while its host goes on, and a step on it may be a replay of one that was recorded: there is no moment
at which its layers begin or end. So whole steps are measured, up to the tokens on the host. What a step through several
layers takes longer than one through a single layer is what the others take, the start of their operations included;
what that one takes beside its layer is the step's overhead.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from typing import NamedTuple

import torch

from tllm.comm.collectives.group import solo
from tllm.comm.links.link import LocalLink
from tllm.core.timing import mean_seconds_each
from tllm.devices.memory import completed
from tllm.engine.assembly import make_stage
from tllm.engine.driver import Deliver, Driver
from tllm.engine.measure.benchmark_layers import batch_of, fill, largest_layer, sampled
from tllm.engine.measure.layer_speed import (
    LEAST_SECONDS,
    AfterRest,
    Passes,
    ServingPasses,
    ServingSizes,
    logits_pass,
    output_heads,
)
from tllm.engine.measure.step_speed import MAX_REPLY_TOKENS, MIN_STEPS, decode_step, follower_step
from tllm.engine.ring_links import RingLinks
from tllm.engine.schedule.batch import Batch, encode
from tllm.engine.schedule.limits import Limits
from tllm.engine.schedule.scheduler import Scheduler
from tllm.engine.stage import PipelineStage
from tllm.model.transformer import build
from tllm.parallel.mesh import Mesh, mesh_of
from tllm.planner.cost.cache_room import MAX_NUM_BATCHED_TOKENS, PAGE_SIZE
from tllm.planner.cost.rank_bytes import kv_bytes
from tllm.planner.measured.survey import SurveyedPass
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec
from tllm.spec.plan import Plan

STREAMED_BYTES = 2**31
"""Bytes of weights that a step through several layers reads at the most: many times what caches of devices hold."""

MOST_LAYERS = 16

VOCABULARY = 1024
"""Tokens of the stages' models: their ends are in every step alike, and logits are measured apart."""


class WholeSteps:
    """Steps of a stage, called again and again. Only calls in which it computes one batch count."""

    def __init__(self, stage: PipelineStage, step: Callable[[], object]) -> None:
        self._stage, self._step = stage, step
        self._taken = list[float]()

    def __call__(self) -> None:
        batches, begun = self._stage.batches, time.perf_counter()
        self._step()
        if self._stage.batches == batches + 1:
            self._taken.append(time.perf_counter() - begun)

    @property
    def seconds(self) -> float:
        """The median."""
        while len(self._taken) < MIN_STEPS:
            self()
        return statistics.median(self._taken)


class StageWithLayers(NamedTuple):
    """A stage of a whole model of so many layers, each as one of `ranks` equal ranks has it."""

    stage: PipelineStage
    num_layers: int
    ranks: int

    def steps(self, batch: Batch) -> WholeSteps:
        """Steps with this batch, up to its tokens."""
        return WholeSteps(self.stage, partial(self.stage.start, batch))

    def computed_steps(self, batch: Batch) -> WholeSteps:
        """The same steps, none of which is played."""
        return WholeSteps(self.stage, partial(self._compute, batch))

    def _compute(self, batch: Batch) -> None:
        graphs, self.stage.graphs = self.stage.graphs, None
        self.stage.start(batch)
        self.stage.graphs = graphs


class LastStage:
    """The last of two stages of a layer each. What comes to it and what it gives passes links inside this process, from
    the host's memory and to it."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, limits: Limits) -> None:
        small = _small(spec, 2)
        plan = Plan.parse("pp=2", small.num_layers)
        mesh = mesh_of(small, plan, 1, solo())
        model = build(small, mesh, dtype, device)
        fill(model, small)
        self._ring = RingLinks(LocalLink(0, 1), LocalLink(1, 0))
        self._stage = make_stage(model, mesh, plan, self._ring, limits)
        self._width, self._dtype = model.received_width, dtype

    def steps(self, sequences: int, prompt: int) -> WholeSteps:
        """Its steps with the next token of each of so many sequences."""
        x_TD = torch.ones(sequences, self._width, dtype=self._dtype)
        payload = encode(sampled(batch_of(sequences, 1, prompt)))
        return WholeSteps(self._stage, partial(follower_step, self._stage, self._ring, payload, x_TD))


@torch.inference_mode()
def device_serving_passes(
    spec: ModelSpec,
    dtype: torch.dtype,
    sizes: ServingSizes,
    device: torch.device,
    free: int,
    seconds: float,
    deliver: Deliver = lambda outputs: None,
) -> ServingPasses:
    """What `serving_passes` measures, of a device with `free` bytes of memory.

    `cooled` is 0: in a step that is measured whole layers find caches as they find them when serving.
    """
    limits, several = _limits(spec, sizes), num_measured_layers(spec, dtype, sizes, free)
    made = partial(stage_with_layers, spec, dtype, device, limits)
    pairs = [(made(1, ranks), made(several, ranks)) for ranks in ((1, 2) if spec.num_heads > 1 else (1,))]
    batches = [sampled(batch_of(count, 1, sizes.prompt)) for count in sizes.sequences]
    batches.append(sampled(batch_of(1, sizes.chunk, 0)))
    steps = [[(single.steps(batch), more.steps(batch)) for batch in batches] for single, more in pairs]
    heads = output_heads(spec, dtype, device)
    ends = [completed(logits_pass(heads, count), device) for count in sizes.sequences]
    driving = [driver_steps(pairs[0][0].stage, count, sizes.prompt, deliver) for count in sizes.sequences]
    last = LastStage(spec, dtype, device, limits)
    following = [last.steps(count, sizes.prompt) for count in sizes.sequences]
    after_rest, computed = AfterRest(steps[0][0][1]), pairs[0][1].computed_steps(batches[0])
    through = [one for of_ranks in steps for both in of_ranks for one in both]
    taken = iter(mean_seconds_each([*ends, *through, computed, *driving, *following, after_rest], seconds))
    layers = tuple(
        _of_layer(single, more, batch, both)
        for (single, more), of_ranks in zip(pairs, steps, strict=True)
        for batch, both in zip(batches, of_ranks, strict=True)
    )
    logits = tuple(SurveyedPass(count, count, 1, next(taken)) for count in sizes.sequences)
    of_layer = {one.rows: one.seconds for one in layers if one.keys and one.ranks == 1}

    def overheads(each: list[WholeSteps]) -> Passes:
        rest = [(count, one.seconds - of_layer[count]) for count, one in zip(sizes.sequences, each, strict=True)]
        return tuple(SurveyedPass(count, 1, 1, max(left, LEAST_SECONDS), sizes.prompt) for count, left in rest)

    return ServingPasses(
        layers=layers,
        logits=logits,
        turns=overheads(driving),
        follows=overheads(following),
        unplayed=max(0.0, (computed.seconds - steps[0][0][1].seconds) / several),
        cooled=0.0,
        rest=after_rest.extra_seconds,
        rested=after_rest.rested_seconds,
    )


def stage_with_layers(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, limits: Limits, num_layers: int, ranks: int
) -> StageWithLayers:
    """The model's first layers between ends of a small vocabulary; where it has too few they come again."""
    small = _small(spec, num_layers)
    cut = dataclasses.replace(cut_stage(small, (1,) * ranks)[0], vocab=(0, small.vocab_size))
    mesh = Mesh(0, 1, range(num_layers), solo(), cut)
    model = build(small, mesh, dtype, device)
    fill(model, small)
    plan = Plan.parse("pp=1", num_layers)
    return StageWithLayers(make_stage(model, mesh, plan, None, limits), num_layers, ranks)


def driver_steps(stage: PipelineStage, sequences: int, prompt: int, deliver: Deliver) -> WholeSteps:
    """Steps of a driver with a token of each of so many sequences; what it makes is delivered."""
    driver = Driver(stage, Scheduler(stage.limits))
    return WholeSteps(stage, partial(decode_step, driver, sequences, prompt, deliver))


def num_measured_layers(spec: ModelSpec, dtype: torch.dtype, sizes: ServingSizes, free: int) -> int:
    """How many layers a stage with several has: as many as have `STREAMED_BYTES`, and no more than half of the `free`
    bytes has room for; two at least."""
    (whole,) = cut_stage(spec, (1,))
    weights = largest_layer(spec, whole) * dtype.itemsize
    of_token = max(kv_bytes(spec, layer, whole, dtype.itemsize, "auto") for layer in spec.layers)
    each = weights + of_token * _limits(spec, sizes).num_pages * PAGE_SIZE
    room = free // 2 // each - 3  # one layer whole and one in half, and one of the last stage, are there beside
    return max(2, min(MOST_LAYERS, STREAMED_BYTES // weights, 2 * room // 3))


def _small(spec: ModelSpec, num_layers: int) -> ModelSpec:
    layers = tuple(islice(cycle(spec.layers), num_layers))
    return dataclasses.replace(spec, layers=layers, vocab_size=min(spec.vocab_size, VOCABULARY), num_labels=0)


def _limits(spec: ModelSpec, sizes: ServingSizes) -> Limits:
    """Room for a reply to each prompt, and for the prompt that is computed at once."""
    most, longest = max(sizes.sequences), sizes.prompt + MAX_REPLY_TOKENS
    return Limits(
        num_pages=max(most * -(-longest // PAGE_SIZE), -(-sizes.chunk // PAGE_SIZE)),
        vocab_size=min(spec.vocab_size, VOCABULARY),
        max_model_len=longest,
        page_size=PAGE_SIZE,
        max_num_seqs=most,  # steps are recorded for no more
        max_num_batched_tokens=max(sizes.chunk, MAX_NUM_BATCHED_TOKENS, most + 1),
        enable_prefix_caching=False,  # the prompts are alike, and each sequence is to read pages of its own
        num_state_slots=most,
        hidden_size=spec.hidden_size,
    )


def _of_layer(
    single: StageWithLayers, more: StageWithLayers, batch: Batch, steps: tuple[WholeSteps, WholeSteps]
) -> SurveyedPass:
    """A layer's pass, from steps through one layer and through several."""
    seconds = (steps[1].seconds - steps[0].seconds) / (more.num_layers - single.num_layers)
    first = batch.entries[0]
    return SurveyedPass(len(batch.token_ids), first.count, single.ranks, max(seconds, LEAST_SECONDS), first.start)
