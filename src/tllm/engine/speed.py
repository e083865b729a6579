"""How fast this process serves a model's layers and its logits: what the time of a token is predicted from."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torch import Tensor, nn

from tllm.comm.group import solo
from tllm.engine.batch import Batch, Entry
from tllm.engine.cache import KVCache
from tllm.engine.limits import Limits
from tllm.engine.paged import PagedAttend
from tllm.engine.stage import lengths, positions
from tllm.ground.timing import mean_seconds
from tllm.model.transformer import Transformer, build
from tllm.parallel.mesh import Mesh
from tllm.planner.parameters import layer_parameters
from tllm.planner.room import PAGE_SIZE
from tllm.planner.survey import Passed
from tllm.spec.cut import cut_stage
from tllm.spec.model import ModelSpec

STREAMED_BYTES = 64 * 2**20
"""Weights that a pass goes through, if the model has so many: more than caches hold, as in a whole model."""

FILLED = 0.01


@torch.inference_mode()
def serving_passes(
    spec: ModelSpec, dtype: torch.dtype, sequences: tuple[int, ...], prompt: int, chunk: int, seconds: float
) -> tuple[tuple[Passed, ...], tuple[Passed, ...]]:
    """(passes through a layer, passes through the logits), in about so many seconds.

    `sequences`: how many have a token each, after a prompt; `chunk`: tokens of a prompt that go through at once.
    """
    halves = (1, 2) if spec.num_heads > 1 else (1,)
    share = seconds / (len(halves) * (len(sequences) + 1) + len(sequences))
    batches = [_batch(count, 1, prompt) for count in sequences] + [_batch(1, chunk, 0)]
    layers = tuple(one for ranks in halves for one in _through_layers(spec, dtype, ranks, batches, share))
    return layers, tuple(_through_logits(spec, dtype, count, share) for count in sequences)


def _through_layers(
    spec: ModelSpec, dtype: torch.dtype, ranks: int, batches: list[Batch], seconds: float
) -> list[Passed]:
    cut = cut_stage(spec, (1,) * ranks)[0]
    held = layers_held(spec, dtype, ranks)
    middle = inside(spec, held)
    model = build(middle, Mesh(1, 3, range(1, 1 + held), solo(), cut), dtype)
    _fill(model)
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
