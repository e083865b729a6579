"""How fast this process serves a model's layers and its logits: what the time of a token is predicted from."""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch

from tllm.comm.collectives.group import solo
from tllm.core.timing import mean_seconds_each
from tllm.devices.choose import CPU
from tllm.engine.driver import Deliver
from tllm.engine.measure.benchmark_layers import (
    BenchmarkLayers,
    Work,
    batch_of,
    fill,
    largest_layer,
    num_streamed_layers,
)
from tllm.engine.measure.step_speed import TimedStep
from tllm.engine.schedule.batch import Batch
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh
from tllm.parallel.quantized_weight import stands_for
from tllm.planner.cost.rank_bytes import end_parameters, kv_bytes
from tllm.planner.measured.survey import SurveyedPass
from tllm.spec.cut import cut_stage
from tllm.spec.model_spec import ModelSpec

REST = 0.01
"""Seconds, about, for which a stage waits until a batch comes round a ring with few others."""

MIN_PAIRS = 5
"""Of works that are compared, measured at least."""

KEYS = 1024
"""More keys of a token, whose reading is measured."""

LEAST_SECONDS = 1e-6
"""Of an overhead that noise would make none."""

Passes = tuple[SurveyedPass, ...]


class ServingSizes(NamedTuple):
    """What is measured: decoding with each number of `sequences`, whose prompts have `prompt` tokens, and a prompt of
    `chunk` tokens at once."""

    sequences: tuple[int, ...]
    prompt: int
    chunk: int


class ServingPasses(NamedTuple):
    """Mean seconds of all that serving a token consists of, on this process.

    - `layers`, `logits`: passes through a layer, and through the model's end with the choice of the likeliest token.
    - `turns`, `follows`: the overhead of a driver's step (with its tokens delivered) and of a following stage's step,
      which is all but their layers.
    - `unplayed`: by how many seconds a layer of one reply takes longer where its operations are called one by one.
    - `cooled`, `rest`: by how many seconds all layers take longer in a step, and after a wait: their caches are cold.
    - `rested`: seconds of all waits while this was measured.
    - `keys_read`: bytes of keys and values per second that attention reads; 0 where they count as read at the speed of
      weights: these are plain, or keys take too little time to tell.
    """

    layers: Passes
    logits: Passes
    turns: Passes
    follows: Passes
    unplayed: float
    cooled: float
    rest: float
    rested: float
    keys_read: float = 0.0


@torch.inference_mode()
def serving_passes(
    spec: ModelSpec,
    dtype: torch.dtype,
    sizes: ServingSizes,
    seconds: float,
    deliver: Deliver = lambda outputs: None,
) -> ServingPasses:
    """What this process takes to serve, measured in about so many seconds.

    `deliver` is given what the driver makes. All are measured by turns: what slows this machine for a while slows all
    of them.
    """
    sequences, prompt, chunk = sizes
    batches = [batch_of(count, 1, prompt) for count in sequences] + [batch_of(1, chunk, 0)]
    layers_of_rank = [BenchmarkLayers(spec, dtype, ranks) for ranks in ((1, 2) if spec.num_heads > 1 else (1,))]
    pairs = [(layers, batch) for layers in layers_of_rank for batch in batches]
    works = [layers.forward_pass(batch, batches) for layers, batch in pairs]
    heads = output_heads(spec, dtype)
    works += [logits_pass(heads, count) for count in sequences]
    whole = layers_of_rank[0]
    driver_steps = [whole.driver_step(count, prompt, deliver) for count in sequences]
    follower_steps = [whole.follower_step(count, prompt) for count in sequences]
    computed = LongerBy(whole.forward_pass(batches[0], batches, may_be_played=False), works[0])
    after_rest, keys = AfterRest(works[0]), _more_keys(whole, prompt)
    more = [] if keys is None else [keys]
    measured = iter(mean_seconds_each([*works, *driver_steps, *follower_steps, computed, after_rest, *more], seconds))
    of_layers = tuple(_layer_pass(layers, batch, next(measured)) for layers, batch in pairs)
    of_logits = tuple(SurveyedPass(count, count, 1, next(measured)) for count in sequences)

    def overheads(steps: list[TimedStep]) -> Passes:
        return tuple(
            SurveyedPass(count, 1, 1, max(step.overhead_seconds, LEAST_SECONDS), prompt)
            for count, step in zip(sequences, steps, strict=True)
        )

    cooled = max(0.0, driver_steps[0].layer_seconds - whole.num_layers * of_layers[0].seconds)
    return ServingPasses(
        layers=of_layers,
        logits=of_logits,
        turns=overheads(driver_steps),
        follows=overheads(follower_steps),
        unplayed=computed.extra_seconds / whole.num_layers,
        cooled=cooled,
        rest=after_rest.extra_seconds,
        rested=after_rest.rested_seconds,
        keys_read=0.0 if keys is None else keys.bytes_per_second,
    )


def _more_keys(layers: BenchmarkLayers, prompt: int) -> ReadsKeys | None:
    """A token behind `KEYS` keys more than a prompt has; None where weights are plain, or no context is so long."""
    spec, end = layers.spec, layers.spec.max_model_len - 1
    near, far = (batch_of(1, 1, keys) for keys in (prompt, min(prompt + KEYS, end)))
    (whole,), item = cut_stage(spec, (1,)), layers.dtype.itemsize
    bytes_read = 0
    for layer in spec.layers[: layers.num_layers]:
        seen = [min(batch.entries[0].start, layer.window or end) for batch in (near, far)]
        bytes_read += (seen[1] - seen[0]) * kv_bytes(spec, layer, whole, item, "auto")
    if spec.quantization is None or bytes_read <= 0:
        return None
    longer, shorter = (layers.forward_pass(batch, [near, far]) for batch in (far, near))
    return ReadsKeys(longer, shorter, bytes_read)


def _layer_pass(layers: BenchmarkLayers, batch: Batch, seconds: float) -> SurveyedPass:
    first = batch.entries[0]
    return SurveyedPass(len(batch.token_ids), first.count, layers.ranks, seconds / layers.num_layers, first.start)


def output_heads(spec: ModelSpec, dtype: torch.dtype, device: torch.device = CPU) -> list[Transformer]:
    """The model's end several times. One alone would stay in a cache in which the layers before it leave nothing."""
    last, cut = spec.num_layers, cut_stage(spec, (1,))[0]
    elements = sum(parameter.elements for parameter in end_parameters(spec, range(last, last), cut)[1])
    between = num_streamed_layers(spec, dtype, 1) * largest_layer(spec, cut)
    heads = [
        build(spec, Mesh(2, 3, range(last, last), solo(), cut), dtype, device) for _ in range(1 + between // elements)
    ]
    for head in heads:
        fill(head, spec)
    return heads


def logits_pass(heads: list[Transformer], rows: int) -> Work:
    """Logits of so many rows, and the choice of the likeliest; each call takes the next of the heads."""
    first, in_turn = next(heads[0].parameters()), cycle(heads)
    x_TD = torch.ones(rows, heads[0].spec.hidden_size, dtype=stands_for(first)[1], device=first.device)
    return partial(_argmax_of_next, in_turn, x_TD)


def _argmax_of_next(heads: cycle[Transformer], x_TD: torch.Tensor) -> torch.Tensor:
    return next(heads).logits(x_TD).argmax(-1)


class LongerBy:
    """One work and then another: `extra_seconds`, by which the first takes longer, is the median of pairs.

    Means over different moments would also differ by what a machine's speed has changed by in between.
    """

    def __init__(self, work: Work, other: Work) -> None:
        self.work, self.other = work, other
        self._differences = list[float]()

    @property
    def extra_seconds(self) -> float:
        while len(self._differences) < MIN_PAIRS:
            self()
        return max(0.0, statistics.median(self._differences))

    def __call__(self) -> None:
        begun = time.perf_counter()
        self.work()
        between = time.perf_counter()
        self.other()
        self._differences.append((between - begun) - (time.perf_counter() - between))


class ReadsKeys(LongerBy):
    """A pass that reads so many bytes of keys and values more than another one."""

    def __init__(self, work: Work, other: Work, bytes_read: int) -> None:
        super().__init__(work, other)
        self._bytes_read = bytes_read

    @property
    def bytes_per_second(self) -> float:
        """0 where they take too little time to tell."""
        seconds = self.extra_seconds
        return self._bytes_read / seconds if seconds > LEAST_SECONDS else 0.0


class AfterRest(LongerBy):
    """Work after a rest, and at once again. `rested_seconds` are those of all rests."""

    def __init__(self, work: Work) -> None:
        super().__init__(work, work)
        self.rested_seconds = 0.0

    def __call__(self) -> None:
        time.sleep(REST)  # as a stage sleeps until its batch comes: what others do meanwhile cools its caches
        self.rested_seconds += REST
        super().__call__()
