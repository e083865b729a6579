"""How fast this process serves a model's layers and its logits: what the time of a token is predicted from."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn

from tllm.comm.group import solo
from tllm.engine.batch import Batch, Entry
from tllm.engine.cache import KVCache
from tllm.engine.driver import Driver
from tllm.engine.limits import Limits
from tllm.engine.paged import PagedAttend
from tllm.engine.scheduler import Scheduler
from tllm.engine.stage import Stage, lengths, positions
from tllm.ground.timing import mean_seconds
from tllm.model.attend import Attend
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh
from tllm.planner.parameters import layer_parameters
from tllm.planner.room import PAGE_SIZE
from tllm.planner.survey import Passed
from tllm.spec.cut import cut_stage
from tllm.spec.model import ModelSpec
from tllm.spec.request import Request, SamplingParams

STREAMED_BYTES = 64 * 2**20
"""Weights that a pass goes through, if the model has so many: more than caches hold, as in a whole model."""

FILLED = 0.01

LEAST = 1e-6
"""Seconds, where noise would make it none."""

TOKENS = 256
"""The longest reply while turns are measured."""

Passes = tuple[Passed, ...]


@torch.inference_mode()
def serving_passes(
    spec: ModelSpec, dtype: torch.dtype, sequences: tuple[int, ...], prompt: int, chunk: int, seconds: float
) -> tuple[Passes, Passes, Passes]:
    """(passes through a layer, passes through the logits, what a driver's step takes beside), in about so many seconds.

    `sequences`: how many have a token each, after a prompt; `chunk`: tokens of a prompt that go through at once.
    """
    halves = (1, 2) if spec.num_heads > 1 else (1,)
    share = seconds / (len(halves) * (len(sequences) + 1) + 2 * len(sequences))
    batches = [_batch(count, 1, prompt) for count in sequences] + [_batch(1, chunk, 0)]
    layers = tuple(one for ranks in halves for one in _through_layers(spec, dtype, ranks, batches, share))
    logits = tuple(_through_logits(spec, dtype, count, share) for count in sequences)
    decodes = {one.rows: one.seconds for one in layers if one.ranks == 1 and one.keys}
    turns = tuple(_turns(spec, dtype, count, prompt, decodes[count], share) for count in sequences)
    return layers, logits, turns


def _through_layers(
    spec: ModelSpec, dtype: torch.dtype, ranks: int, batches: list[Batch], seconds: float
) -> list[Passed]:
    model, held = _held(spec, dtype, ranks)
    cache = KVCache(model.attention_specs(), model.kv_shape, _limits(spec, batches), dtype)
    found = []
    for batch in batches:
        x_TD = torch.ones(len(batch.token_ids), spec.hidden_size, dtype=dtype)
        taken = mean_seconds(partial(_forward, model, cache, batch, x_TD), seconds) / held
        first = batch.entries[0]
        found.append(Passed(len(x_TD), first.count, ranks, taken, first.start))
    return found


def _forward(model: Transformer, cache: KVCache, batch: Batch, x_TD: Tensor) -> Tensor:
    out_TD: Tensor = model(x_TD, positions(batch), PagedAttend(cache, batch.entries), lengths(batch))
    return out_TD


def _through_logits(spec: ModelSpec, dtype: torch.dtype, rows: int, seconds: float) -> Passed:
    """Of so many rows, and the choice of the likeliest."""
    last = spec.num_layers
    model = build(spec, Mesh(2, 3, range(last, last), solo(), cut_stage(spec, (1,))[0]), dtype)
    _fill(model)
    x_TD = torch.ones(rows, spec.hidden_size, dtype=dtype)
    return Passed(rows, rows, 1, mean_seconds(lambda: model.logits(x_TD).argmax(-1), seconds))


class _Middle:
    """Layers as a whole model, whose ends take no time."""

    is_first = is_last = True

    def __init__(self, model: Transformer, rows: int, dtype: torch.dtype) -> None:
        self.model = model
        self.hidden_TD = torch.ones(rows, model.spec.hidden_size, dtype=dtype)
        self.logits_TV = torch.zeros(rows, model.spec.vocab_size)

    def __call__(self, x: Tensor, positions_T: Tensor, attend: Attend, lengths_T: Tensor | None = None) -> Tensor:
        out_TD: Tensor = self.model(self.hidden_TD[: len(x)], positions_T, attend, lengths_T)
        return out_TD

    def logits(self, x_TD: Tensor) -> Tensor:
        return self.logits_TV[: len(x_TD)]


def _turns(spec: ModelSpec, dtype: torch.dtype, count: int, prompt: int, layer: float, seconds: float) -> Passed:
    """What a driver does with a token of each of so many sequences, beside layers that take `layer` seconds each."""
    model, held = _held(spec, dtype, 1)
    pages = count * -(-(prompt + TOKENS) // PAGE_SIZE)
    limits = Limits(num_pages=pages, vocab_size=spec.vocab_size, max_model_len=prompt + TOKENS, page_size=PAGE_SIZE)
    cache = KVCache(model.attention_specs(), model.kv_shape, limits, dtype)
    middle = _Middle(model, limits.max_num_batched_tokens, dtype)
    stage = Stage(middle, cache, solo(), None, limits, spec.hidden_size, [(0, spec.vocab_size)])
    driver = Driver(stage, Scheduler(limits))
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    taken = mean_seconds(partial(_turn, driver, count, prompt, params), seconds)
    return Passed(count, 1, 1, max(taken - held * layer, LEAST), prompt)


def _turn(driver: Driver, count: int, prompt: int, params: SamplingParams) -> None:
    """One token of each sequence; after the last of their replies they begin anew."""
    if not driver.has_work:
        for number in range(count):
            driver.submit(Request(id=str(number), prompt_ids=(0,) * prompt, params=params))
        while any(sequence.num_output == 0 for sequence in driver.scheduler.by_id.values()):
            driver.step()
    driver.step()


def _held(spec: ModelSpec, dtype: torch.dtype, ranks: int) -> tuple[Transformer, int]:
    """What one of so many ranks has of some layers, and how many these are."""
    held, cut = layers_held(spec, dtype, ranks), cut_stage(spec, (1,) * ranks)[0]
    model = build(inside(spec, held), Mesh(1, 3, range(1, 1 + held), solo(), cut), dtype)
    _fill(model)
    return model, held


def layers_held(spec: ModelSpec, dtype: torch.dtype, ranks: int) -> int:
    """How many layers `STREAMED_BYTES` take, of those that the model has."""
    cut = cut_stage(spec, (1,) * ranks)[0]
    largest = max(sum(one.elements for one in layer_parameters(spec, layer, cut)) for layer in spec.layers)
    return min(spec.num_layers, max(1, STREAMED_BYTES // (largest * dtype.itemsize)))


def inside(spec: ModelSpec, count: int) -> ModelSpec:
    """The model with layers 1 to `count` that are its first ones, and one more at each end."""
    return dataclasses.replace(spec, layers=(spec.layers[0], *spec.layers[:count], spec.layers[-1]))


def _batch(sequences: int, count: int, start: int) -> Batch:
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
